// What was drafted, what came of it and what it took. Needs format.js; segment() is the dashboard's.
"use strict";

const SHOWN_POSITIONS = 16;

function showSpeculation(found) {
  $("speculation").hidden = !found;
  if (!found) return;
  setText("speculation-note", found.method + ", up to " + format.count(found.most_tokens) + " tokens" +
    (found.simulated && found.method !== "simulated" ? ", simulated" : "") + (found.simulated ? ": acceptance is not measured" : ""));
  const numbers = [
    ["tokens per pass", found.drafts ? found.tokens_per_pass.toFixed(2) : "–"],
    ["passes with a draft", format.count(found.drafts)],
    ["drafted", format.count(found.proposed)],
    ["verified", format.count(found.verified)],
    ["accepted", format.count(found.accepted)],
    ["wasted", format.count(found.wasted)],
    ["time in drafting", format.seconds(found.draft_seconds)],
    ["time in verifying", format.seconds(found.verify_seconds)],
  ];
  if (found.branches) {
    numbers.push(["branches accepted", format.count(found.branches_accepted) + " of " + format.count(found.branches)]);
  }
  const made = found.simulated ? " (simulated)" : "";
  $("speculation-numbers").replaceChildren(...numbers.map(([name, value], index) =>
    element("div", {}, element("dt", {}, name + (index === 0 || name === "accepted" || name === "wasted" ? made : "")),
      element("dd", {}, value))));
  $("speculation-empty").hidden = found.verified > 0;
  $("speculation-found").hidden = !found.verified;
  if (!found.verified) return;
  const parts = [["accepted", found.accepted], ["wasted", found.wasted]];
  $("speculation-stack").replaceChildren(...parts.map(([name, count]) => segment(name, count / found.verified)));
  $("speculation-stack").setAttribute("aria-label", parts.map(([name, count]) =>
    name + " " + format.share(count / found.verified)).join(", ") + made);
  $("speculation-legend").replaceChildren(...parts.map(([name, count]) => element("li", {},
    element("i", { class: "key " + name }), name + made, element("b", {}, format.share(count / found.verified)))));
  const shown = found.by_position.slice(0, SHOWN_POSITIONS);
  setText("positions-title", "Drafts accepted up to each position" + made);
  $("positions").replaceChildren(...shown.map((share, index) => {
    const bar = element("span", { class: "accepted" });
    bar.style.height = Math.max(1, 100 * share).toFixed(1) + "%";
    return element("li", { title: "position " + (index + 1) }, element("b", {}, format.share(share)),
      element("div", { class: "column" }, bar), element("small", {}, String(index + 1)));
  }));
}
