"use strict";
// Draws the figures of a report as SVG from the data in the page. Arms can be switched off, plots zoomed by dragging.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.querySelector(".tip");
const off = new Set();
const drawings = [];
const MARGIN = { top: 26, right: 14, bottom: 38 };
const textWidth = (text) => 6.4 * text.length;  // of 11 px digits, rounded up
const color = (arm) => data.colors[arm] ?? "var(--soft)";

function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "rect", "text", "clipPath"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value, unit = "") {
  if (unit === "%") return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value !== 0 ? 1 : 0)}%`;
  if (unit === "B") {
    const power = value > 0 ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
    const size = value / 1024 ** power;
    return `${size.toFixed(size >= 100 || power === 0 ? 0 : size >= 10 ? 1 : 2)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }
  if (unit === "B/s") {
    const power = value >= 1e3 ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
    return `${(value / 1000 ** power).toPrecision(3)} ${["B/s", "kB/s", "MB/s", "GB/s", "TB/s"][power]}`;
  }
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + (unit ? ` ${unit}` : "");
}

function ticks(low, high, axis, count) {
  if (axis.log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const step of high / low > 1000 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5]) found.push(step * 10 ** power);
    return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  }
  const base = axis.unit === "B" ? 2 : 10;
  const rough = (high - low) / count || 1;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = base === 2 ? (rough > power ? 2 * power : power) : [1, 2, 2.5, 5, 10].map((by) => by * power).find((by) => by >= rough * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(Math.round(tick / step) * step + 0);
  return found;
}

// An axis begins and ends at a mark, so that no line leaves it; from 0 where a line could be read as a share of it.
function whole(low, high, axis, cut) {
  const found = ticks(low, high, axis, 5);
  if (found.length < 2) return [low, high];
  const step = found[1] - found[0];
  return [cut || low < 0 ? Math.floor(low / step + 1e-9) * step : low, Math.ceil(high / step - 1e-9) * step];
}

// Marks of one axis have the same digits; the axis names the unit unless it is bytes or percent.
function marks(values, axis) {
  if (["%", "B", "B/s"].includes(axis.unit)) return values.map((value) => number(value, axis.unit));
  const exact = [0, 1, 2, 3].find((digits) => values.every((value) => Math.abs(value * 10 ** digits - Math.round(value * 10 ** digits)) < 1e-6));
  if (axis.log || exact === undefined) return values.map((value) => number(value));
  return values.map((value) => value.toLocaleString("en", { minimumFractionDigits: exact, maximumFractionDigits: exact }));
}

function scale(low, high, from, to, log) {
  const turn = log ? Math.log : (value) => value;
  const [a, b] = [turn(low), turn(high)];
  const there = (value) => from + ((turn(value) - a) / (b - a || 1)) * (to - from);
  there.back = (pixel) => { const at = a + ((pixel - from) / (to - from)) * (b - a); return log ? Math.exp(at) : at; };
  return there;
}

function pathOf(points, x, y, style) {
  return points.map(([px, py], index) => {
    const [sx, sy] = [x(px).toFixed(1), y(py).toFixed(1)];
    if (index === 0) return `M${sx},${sy}`;
    return style === "steps" ? `H${sx}V${sy}` : `L${sx},${sy}`;
  }).join("");
}

// A workload chosen in one figure is chosen in all that have it.
const follow = (name, value) => { for (const drawing of drawings) drawing.choose(name, value); };

class LinePlot {
  constructor(figure, place) {
    Object.assign(this, { figure, place, zoom: null });
    this.panel = figure.panels[0];
    this.choices();
    place.querySelector(".plot").addEventListener("dblclick", () => this.unzoom());
    new ResizeObserver(() => this.draw()).observe(place.querySelector(".plot"));
  }

  choices() {
    const box = this.place.querySelector(".choices");
    this.selects = {};
    for (const [name, title] of [["workload", "Workload"], ["choice", "What to draw"]]) {
      const values = [...new Set(this.figure.panels.map((panel) => panel[name]))];
      if (values.length < 2) continue;
      const select = node("select", { "aria-label": `${title}: ${this.figure.title}` }, ...values.map((value) => node("option", { value }, value)));
      select.addEventListener("change", () => name === "workload" ? follow(name, select.value) : this.choose(name, select.value));
      this.selects[name] = select;
      box.append(select);
    }
    if (this.figure.style !== "dots" && this.figure.panels.some((panel) => panel.y.unit === "ms")) {
      this.logs = node("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Log scale");
      this.logs.addEventListener("click", () => { this.logs.setAttribute("aria-pressed", String(this.logs.getAttribute("aria-pressed") !== "true")); this.draw(); });
      box.append(this.logs);
    }
    this.reset = node("button", { type: "button", class: "quiet" }, "Whole range");
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => this.unzoom());
    box.append(this.reset);
  }

  choose(name, value) {
    const wanted = { workload: this.panel.workload, choice: this.panel.choice, [name]: value };
    const other = name === "workload" ? "choice" : "workload";
    const found = this.figure.panels.find((panel) => panel.workload === wanted.workload && panel.choice === wanted.choice)
      ?? this.figure.panels.find((panel) => panel[name] === value);
    if (!found) return;
    this.panel = found;
    this.zoom = null;
    if (this.selects[name]) this.selects[name].value = value;
    if (this.selects[other]) this.selects[other].value = found[other];
    this.draw();
  }

  log() { return this.logs?.getAttribute("aria-pressed") === "true" && this.panel.y.unit === "ms"; }

  unzoom() { this.zoom = null; this.draw(); }

  draw() {
    const { panel, figure } = this;
    const plot = this.place.querySelector(".plot");
    const width = Math.max(240, Math.floor(plot.clientWidth));
    const height = width > 760 ? 340 : 270;
    const lines = panel.lines.filter((line) => !off.has(line.arm) && line.points.length);
    this.reset.hidden = !this.zoom;
    if (!lines.length) { plot.replaceChildren(node("p", { class: "empty" }, "Every arm is switched off.")); return; }
    const [x, y, box] = this.axes(lines, width, height);
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${figure.title}, ${panel.workload}: ${panel.y.label} by ${panel.x.label}` });
    const clip = `clip-${figure.key}`;
    const over = figure.style === "line" || figure.style === "steps" ? 1 : 5;  // room for dots on the edge
    svg.append(node("clipPath", { id: clip }, node("rect", { x: box.left - over, y: box.top - over, width: box.right - box.left + 2 * over, height: box.bottom - box.top + 2 * over })));
    this.grid(svg, x, y, box);
    const inside = node("g", { "clip-path": `url(#${clip})` });
    for (const line of lines) this.line(inside, line, x, y, lines.length);
    svg.append(inside);
    this.pointing(svg, lines, x, y, box);
    plot.replaceChildren(svg, this.legend(lines));
  }

  legend(lines) {
    const dots = this.figure.style === "dots";
    return node("ul", { class: "legend" }, ...lines.map(({ arm }) => node("li", {}, node("i", { class: `key ${dots ? "round" : arm === data.baseline ? "dashes" : "dash"}`, style: `color:${color(arm)}` }), arm, ...(arm === data.baseline ? [" (baseline)"] : []))));
  }

  axes(lines, width, height) {
    const { panel, figure } = this;
    const xs = lines.flatMap((line) => line.points.map((point) => point[0]));
    let [left, right] = this.zoom ?? [Math.min(...xs), Math.max(...xs)];
    const seen = lines.flatMap((line) => line.points.flatMap(([px, py], index) => px >= left && px <= right ? (line.upper[index] === undefined ? [py] : [py, line.upper[index]]) : []));
    let [low, high] = [Math.min(...seen), Math.max(...seen)];
    if (!seen.length) [low, high] = [0, 1];
    const pad = (high - low || Math.abs(high) || 1) * 0.07;
    if (panel.y.unit === "%" && figure.style === "steps") [low, high] = [0, 1];
    else if (figure.style === "dots") [low, high] = [low - pad, high + pad];
    else if (this.log() && low > 0) [low, high] = [low / 1.15, high * 1.15];
    else [low, high] = [low >= 0 ? 0 : low - pad, high > 0 ? high + pad : 1];
    if (!this.zoom) {
      if (figure.style === "dots") [left, right] = [left - 0.5, right + 0.5];
      else if (!panel.x.log) { if (left >= 0) left = 0; right += figure.style === "curve" ? (right - left) * 0.05 : 0; }
    }
    if (panel.x.log) left = Math.max(left, right / 1e6, 1e-9);
    if (right <= left) right = left + 1;
    const log = this.log() && low > 0;
    if (!log && !(panel.y.unit === "%" && figure.style === "steps")) [low, high] = whole(low, high, panel.y, figure.style === "dots");
    const widest = Math.max(...marks(ticks(low, high, { ...panel.y, log }, 5), { ...panel.y, log }).map(textWidth));
    const box = { left: Math.max(40, Math.ceil(widest) + 12), right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const x = scale(left, right, box.left, box.right, panel.x.log);
    const y = scale(low, high, box.bottom, box.top, log);
    Object.assign(x, { low: left, high: right });
    Object.assign(y, { low, high, log });
    return [x, y, box];
  }

  grid(svg, x, y, box) {
    const { panel } = this;
    const across = ticks(x.low, x.high, panel.x, Math.max(3, (box.right - box.left) / 90));
    const up = ticks(y.low, y.high, { ...panel.y, log: y.log }, 5);
    const [upMarks, acrossMarks] = [marks(up, { ...panel.y, log: y.log }), marks(across, panel.x)];
    for (const [index, tick] of up.entries()) {
      svg.append(node("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
        node("text", { x: box.left - 7, y: y(tick) + 4, "text-anchor": "end" }, upMarks[index]));
    }
    for (const [index, tick] of across.entries()) {
      if (this.figure.style === "dots" && !Number.isInteger(tick)) continue;
      svg.append(node("line", { class: "grid", x1: x(tick), x2: x(tick), y1: box.top, y2: box.bottom }),
        node("text", { x: Math.min(x(tick), box.right + MARGIN.right - textWidth(acrossMarks[index]) / 2), y: box.bottom + 15, "text-anchor": "middle" }, acrossMarks[index]));
    }
    const named = (axis) => axis.unit && !["%", "B", "B/s"].includes(axis.unit) ? `${axis.label}, ${axis.unit}` : axis.label;
    const better = panel.better === "lower" ? " (lower is better)" : panel.better === "higher" ? " (higher is better)" : "";
    svg.append(node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      node("text", { x: box.right, y: box.bottom + 32, "text-anchor": "end" }, named(panel.x)),
      node("text", { x: 2, y: 11 }, named(panel.y) + better));
  }

  line(inside, line, x, y, count) {
    const stroke = `stroke:${color(line.arm)}`;
    const { style } = this.figure;
    const baseline = line.arm === data.baseline;
    if (line.upper.length) {
      const strokes = line.points.map(([px, py], index) => `M${x(px).toFixed(1)},${y(py).toFixed(1)}V${y(line.upper[index]).toFixed(1)}`);
      inside.append(node("path", { d: strokes.join(""), style: stroke, "stroke-width": 1.1, opacity: 0.45 }));
    }
    if (style !== "dots") inside.append(node("path", { d: pathOf(line.points, x, y, style), fill: "none", style: stroke, "stroke-width": 1.9, "stroke-linejoin": "round", "stroke-dasharray": baseline ? "5 3" : undefined }));
    if (style === "dots" || style === "curve" || line.points.length === 1) {
      line.points.forEach(([px, py], index) => inside.append(node("circle", { cx: x(px), cy: y(py), r: 4.2, style: `${stroke};fill:${line.hollow[index] ? "var(--card)" : color(line.arm)}`, "stroke-width": 1.6 })));
    }
  }

  pointing(svg, lines, x, y, box) {
    const cursor = node("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    const brush = node("rect", { class: "brush", y: box.top, height: box.bottom - box.top, width: 0 });
    const dots = node("g");
    svg.append(brush, cursor, dots);
    const single = this.figure.style === "dots" || this.figure.style === "curve";
    let from = null;
    const at = (event) => {
      const frame = svg.getBoundingClientRect();
      return [Math.max(box.left, Math.min(box.right, event.clientX - frame.left)), event.clientY - frame.top];
    };
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); dots.replaceChildren(); };
    svg.addEventListener("pointerdown", (event) => { if (event.button === 0) from = at(event)[0]; });
    svg.addEventListener("pointerleave", () => { from = null; brush.setAttribute("width", 0); leave(); });
    svg.addEventListener("pointerup", (event) => {
      const to = at(event)[0];
      if (from !== null && Math.abs(to - from) > 12) { this.zoom = [x.back(Math.min(from, to)), x.back(Math.max(from, to))]; leave(); this.draw(); }
      from = null;
    });
    svg.addEventListener("pointermove", (event) => {
      const [px, py] = at(event);
      if (from !== null) { brush.setAttribute("x", Math.min(from, px)); brush.setAttribute("width", Math.abs(px - from)); }
      const near = [];
      for (const line of lines) {
        let best = null;
        line.points.forEach((point, index) => {
          const distance = single ? Math.hypot(x(point[0]) - px, y(point[1]) - py) : Math.abs(x(point[0]) - px);
          if (x(point[0]) >= box.left - 1 && x(point[0]) <= box.right + 1 && (!best || distance < best.distance)) best = { line, point, index, distance };
        });
        if (best && (single || best.distance < 40)) near.push(best);
      }
      near.sort((a, b) => a.distance - b.distance);
      const told = single ? near.slice(0, 1).filter((one) => one.distance < 30) : near.sort((a, b) => b.point[1] - a.point[1]);
      if (!told.length) { leave(); return; }
      const where = told.reduce((a, b) => a.distance < b.distance ? a : b).point[0];
      cursor.setAttribute("visibility", single ? "hidden" : "visible");
      cursor.setAttribute("x1", x(where));
      cursor.setAttribute("x2", x(where));
      dots.replaceChildren(...told.map(({ line, point }) => node("circle", { cx: x(point[0]), cy: y(point[1]), r: single ? 7 : 3.5, fill: single ? "none" : color(line.arm), style: `stroke:${color(line.arm)};fill:${single ? "none" : color(line.arm)}`, "stroke-width": 1.6 })));
      this.tell(event, told, where, single);
    });
  }

  tell(event, told, where, single) {
    const { panel } = this;
    const rows = told.map(({ line, point, index }) => {
      const worst = line.upper[index];
      return node("p", {}, node("span", {}, node("i", { class: "key", style: `background:${color(line.arm)}` }), line.arm),
        node("b", {}, number(point[1], panel.y.unit) + (worst === undefined ? "" : ` to ${number(worst, panel.y.unit)}`)));
    });
    const first = told[0];
    const head = [single && panel.choice && this.figure.style === "dots" ? `run ${number(first.point[0])}` : `${panel.x.label} ${number(where, panel.x.unit)}`];
    if (single && first.line.notes[first.index]) head.push(first.line.notes[first.index]);
    tip.replaceChildren(...head.map((text) => node("p", { class: "at" }, text)), ...rows);
    place(event);
  }
}

function place(event) {
  tip.hidden = false;
  const frame = tip.getBoundingClientRect();
  const left = event.clientX + 16 + frame.width > innerWidth - 8 ? event.clientX - frame.width - 16 : event.clientX + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - frame.height - 8))}px`;
}

class StackPlot {
  constructor(figure, place) {
    Object.assign(this, { figure, place });
    const workloads = [...new Set(figure.rows.map((row) => row.workload))];
    if (workloads.length > 3) {
      this.workload = workloads[0];
      this.select = node("select", { "aria-label": `Workload: ${figure.title}` }, ...workloads.map((value) => node("option", { value }, value)));
      this.select.addEventListener("change", () => follow("workload", this.select.value));
      place.querySelector(".choices").append(this.select);
    }
    this.draw();
  }

  choose(name, value) {
    if (name !== "workload" || !this.select || !this.figure.rows.some((row) => row.workload === value)) return;
    this.workload = this.select.value = value;
    this.draw();
  }

  draw() {
    const { figure } = this;
    const rows = figure.rows.filter((row) => !off.has(row.arm) && (!this.workload || row.workload === this.workload));
    const plot = this.place.querySelector(".plot");
    const groups = new Map();
    for (const row of rows) groups.set(row.workload, [...(groups.get(row.workload) ?? []), row]);
    const total = (row) => row.parts.reduce((a, b) => a + b, 0);
    const used = figure.parts.map((_, index) => rows.some((row) => row.parts[index] > 0));
    const made = [...groups].map(([workload, inside]) => {
      const most = figure.share ? 1 : Math.max(...inside.map(total));
      return node("div", { class: "stack-group" }, ...(groups.size > 1 ? [node("h4", {}, workload)] : []), ...inside.map((row) => this.row(row, most, total(row))));
    });
    const legend = node("ul", { class: "legend" }, ...figure.parts.map((part, index) => [part, index]).filter(([, index]) => used[index]).map(([part, index]) => node("li", {}, node("i", { class: `key${this.hatched(index) ? " hatched" : ""}`, style: `background-color:${this.fill(index)}` }), part)));
    plot.replaceChildren(...(made.length ? [...made, legend] : [node("p", { class: "empty" }, "Every arm is switched off.")]));
  }

  // Parts that the client had to guess are hatched.
  hatched(index) { return index >= data.told[this.figure.key]; }

  fill(index) { return `var(--${data.fills[this.figure.key][index]})`; }

  row(row, most, total) {
    const { figure } = this;
    const bar = node("div", { class: figure.share ? "stack full" : "stack" });
    row.parts.forEach((part, index) => {
      if (part > 0) bar.append(node("i", { class: this.hatched(index) ? "hatched" : "", style: `width:${(100 * part / most).toFixed(3)}%;background-color:${this.fill(index)}` }));
    });
    const end = figure.share ? `${number(1 - row.parts[0], "%")} hit` : number(total, figure.unit);
    const made = node("div", { class: "stack-row" }, node("span", {}, node("i", { class: "key", style: `background:${color(row.arm)}` }), row.arm), bar, node("span", {}, end));
    made.addEventListener("pointermove", (event) => {
      const parts = row.parts.map((part, index) => [part, index]).filter(([part]) => part > 0);
      tip.replaceChildren(node("p", { class: "at" }, row.arm), ...parts.map(([part, index]) => node("p", {}, node("span", {}, node("i", { class: "key", style: `background:${this.fill(index)}` }), figure.parts[index]), node("b", {}, number(part, figure.unit)))), ...(row.note ? [node("p", { class: "at" }, row.note)] : []));
      place(event);
    });
    made.addEventListener("pointerleave", () => { tip.hidden = true; });
    return made;
  }
}

for (const figure of data.figures) {
  const at = document.querySelector(`[data-figure="${figure.key}"]`);
  drawings.push(figure.kind === "stack" ? new StackPlot(figure, at) : new LinePlot(figure, at));
}

for (const button of document.querySelectorAll(".arm:not(:disabled)")) {
  button.addEventListener("click", () => {
    const { arm } = button.dataset;
    if (!off.delete(arm)) off.add(arm);
    button.setAttribute("aria-pressed", String(!off.has(arm)));
    for (const row of document.querySelectorAll("tbody tr[data-arm]")) row.classList.toggle("off", off.has(row.dataset.arm));
    for (const drawing of drawings) drawing.draw();
  });
}

for (const button of document.querySelectorAll(".sort")) {
  button.addEventListener("click", () => {
    const column = button.closest("th").cellIndex;
    const table = button.closest("table");
    const down = button.getAttribute("aria-sort") !== "descending";
    for (const other of table.querySelectorAll(".sort")) other.removeAttribute("aria-sort");
    button.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => { const cell = row.cells[column]; return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value); };
    const order = (a, b) => typeof a === typeof b ? (typeof a === "number" ? a - b : a.localeCompare(b)) : typeof a === "number" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].sort((a, b) => order(value(a), value(b)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  });
}

// A table that is wider than its place says so.
for (const box of document.querySelectorAll(".scroll")) {
  const hint = node("p", { class: "hint" }, "Scroll sideways to see all columns \u2192");
  box.before(hint);
  const tell = () => { hint.hidden = box.scrollWidth <= box.clientWidth + 1; };
  new ResizeObserver(tell).observe(box);
  tell();
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("code").textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(button.parentElement.querySelector("code")); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
// What is folded away on a screen is printed.
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
document.documentElement.dataset.drawn = String(drawings.length);
})();
