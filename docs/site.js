// Code and tables that are wider than the page scroll. With a tabindex they can be reached and scrolled by keyboard too.
// The theme wraps tables after the page has loaded.
const MAY_SCROLL = ".md-typeset__scrollwrap, .md-typeset pre > code";

function makeReachable() {
  for (const element of document.querySelectorAll(MAY_SCROLL)) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
}

new MutationObserver(makeReachable).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", makeReachable);
makeReachable();

// People paste options: in the search box `--hours` becomes `hours`, because its query language has another use for `-`.
addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\s)--+/g, "$1");
}, true);
