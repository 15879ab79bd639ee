// Numbers and small pieces of the page, shared by the dashboard and the chat. No state but the API key.
"use strict";

const $ = (id) => document.getElementById(id);

const format = {
  count(value) {
    return Math.round(value).toLocaleString("en-US");
  },
  rate(value) {
    return value >= 100 ? format.count(value) : value.toFixed(1);
  },
  share(value) {
    if (value > 0 && value < 0.001) return "<0.1%";
    return (100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0) + "%";
  },
  seconds(value) {
    if (value < 0.0995) return (1000 * value).toFixed(value < 0.00995 ? 1 : 0) + " ms";
    if (value < 0.9995) return (1000 * value).toFixed(0) + " ms";
    if (value < 99.5) return value.toFixed(value < 9.995 ? 2 : 1) + " s";
    return format.span(value);
  },
  span(value) {
    const seconds = Math.floor(value);
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const at = Math.max(0, parts.findIndex(([size]) => seconds >= size));
    if (seconds < 60) return seconds + " s";
    const [size, unit] = parts[at];
    const [nextSize, nextUnit] = parts[at + 1];
    const rest = Math.floor((seconds % size) / nextSize);
    return Math.floor(seconds / size) + " " + unit + (rest ? " " + rest + " " + nextUnit : "");
  },
  bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (value >= 999.5 && at < units.length - 1) {
      value /= 1000;
      at += 1;
    }
    return (at < 2 || value >= 99.5 ? value.toFixed(0) : value.toFixed(1)) + " " + units[at];
  },
};

// element("i", {class: "key"}, "text", child, ...)
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function setText(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

const KEY = "spillover-api-key";

function apiHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: "Bearer " + key } : {};
}
