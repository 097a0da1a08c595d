// Sets the theme before the first paint: modules run later, and the page would flash. Otherwise as theme.js.
document.documentElement.dataset.theme = localStorage.getItem("deskside.theme") ?? "system";
