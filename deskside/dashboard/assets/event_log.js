// The lines of a log that grows. What was appended is added to the text, so that the part that is scrolled to, and what
// is selected, stay. At the end of the log, the newest lines stay in sight.
export default function ({ parentElement, data }) {
  const log = parentElement.querySelector(".log");
  const shown = log.textContent;
  if (data.text === shown) return;
  const atEnd = shown !== "" && log.scrollHeight - log.scrollTop - log.clientHeight < 2 && log.scrollTop > 0;
  if (shown !== "" && data.text.startsWith(shown)) log.append(data.text.slice(shown.length));
  else log.textContent = data.text;
  if (atEnd) log.scrollTop = log.scrollHeight;
}
