"use strict";
// Shows the reports that have all of the words asked for, and a verdict of the kind asked for. The words are in the address.
(() => {
const texts = JSON.parse(document.getElementById("data").textContent);
const find = document.getElementById("find");
const word = document.getElementById("word");
const entries = [...document.querySelectorAll(".entry")];

function show() {
  const asked = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const entry of entries) {
    const words = entry.dataset.words.split("|");
    const fits = asked.every((each) => texts[entry.dataset.name].includes(each)) && (!word.value || words.includes(word.value));
    entry.hidden = !fits;
    shown += fits;
  }
  document.getElementById("found").textContent = `${shown} of ${entries.length} reports`;
  document.getElementById("none").hidden = shown > 0;
}

find.value = decodeURIComponent(location.hash.slice(1));
for (const input of [find, word]) input.addEventListener("input", show);
find.addEventListener("change", () => history.replaceState(null, "", find.value ? `#${encodeURIComponent(find.value)}` : "#"));
document.querySelector(".find").addEventListener("submit", (event) => event.preventDefault());
show();
document.documentElement.dataset.ready = "1";
})();
