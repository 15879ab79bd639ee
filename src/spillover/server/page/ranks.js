// How often the ranks of a model met, and how evenly their experts are asked for. Needs format.js.
"use strict";

function showRanks(found) {
  $("ranks").hidden = !found;
  if (!found) return;
  setText("ranks-note", format.count(found.size) + ", each with a part of the model");
  const numbers = [
    ["collectives", format.count(found.calls)],
    ["sent by rank 0", format.bytes(found.bytes)],
    ["wait of rank 0", format.seconds(found.seconds)],
  ];
  $("ranks-numbers").replaceChildren(...numbers.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const rows = found.expert_rows, total = rows.reduce((sum, count) => sum + count, 0);
  $("ranks-experts").hidden = !total;
  if (!total) return;
  const most = Math.max(...rows);
  setText("ranks-title", "Rows of each rank's experts; the busiest rank has " +
    (most * rows.length / total).toFixed(2) + " times an even share");
  $("ranks-rows").replaceChildren(...rows.map((count, rank) => {
    const bar = element("span", { class: "accepted" });
    bar.style.height = Math.max(1, 100 * count / most).toFixed(1) + "%";
    return element("li", { title: "rank " + rank + ": " + format.count(count) + " rows" },
      element("b", {}, format.share(count / total)), element("div", { class: "column" }, bar),
      element("small", {}, String(rank)));
  }));
}
