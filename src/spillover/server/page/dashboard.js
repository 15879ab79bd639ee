// Polls /live once a second and draws it. Every number on the page comes from that one document.
"use strict";

const POLL_MS = 1000;
const ROWS = 16;
const SPANS = [4, 8, 12, 20, 40, 60, 120, 240, 480, 960]; // seconds of timeline; a tick each quarter
const PHASES = ["queue", "restore", "prefill", "decode"];

function show(live) {
  showHeader(live);
  showTiles(live);
  showThroughput(live.generation_rate);
  showTiers(live);
  showSources(live.sources);
  showSpeculation(live.speculation);
  showRanks(live.ranks);
  showRequests(live);
}

// Header

const STATES = {
  ready: "ready", starting: "starting", sleeping: "asleep", hung: "engine hung", dead: "engine down", away: "not reachable",
};

function showHeader(live) {
  const state = $("state");
  state.dataset.state = live.state;
  setText("state", STATES[live.state] || live.state);
  setText("model", live.model);
  document.title = (live.running ? "(" + live.running + ") " : "") + live.model + " · Spillover";
  const facts = [["up", format.span(live.uptime)]];
  if (live.device) facts.push(["on", [live.device, live.dtype].filter(Boolean).join(", ")]);
  if (live.max_model_len) facts.push(["context", format.count(live.max_model_len)]);
  if (live.null_model) facts.push(["weights", "none (null model)"]);
  if (live.restarts) facts.push(["engine restarts", format.count(live.restarts)]);
  facts.push(["version", live.version]);
  $("facts").replaceChildren(...facts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  showBanner(live);
}

function showBanner(live) {
  const asked = {
    dead: "The engine is down: requests are rejected until it is back. The server's log says why it stopped.",
    hung: "The engine sends no heartbeats: requests are rejected until it does, or until it has been restarted.",
    starting: "The engine is starting. Requests are answered when the model is loaded.",
    sleeping: "The engine is asleep: its weights are out of device memory. POST /wake_up brings them back; requests wait until then.",
  };
  banner(asked[live.state], live.state === "dead" || live.state === "hung" ? "bad" : "warn");
}

function banner(text, kind) {
  const node = $("banner");
  node.hidden = !text;
  node.dataset.kind = kind;
  if (text) setText("banner", text);
}

// Tiles

function showTiles(live) {
  setText("running", format.count(live.running));
  setText("running-note", live.max_num_seqs ? "of " + format.count(live.max_num_seqs) + " at once" : "requests");
  setText("waiting", format.count(live.waiting));
  setText("waiting-note", live.preemptions ? format.count(live.preemptions) + " preempted so far" : "in the queue");
  setText("rate", format.rate(lately(live.generation_rate)));
  setText("prefill", format.rate(lately(live.prefill_rate)));
  for (const name of ["ttft", "tpot"]) {
    const spread = live.latency[name];
    setText(name, spread ? format.seconds(spread.p50) : "–");
    setText(name + "-note", spread ? "p50; p99 " + format.seconds(spread.p99) : "no finished request yet");
  }
  const { total, cached } = fromCache(live.sources);
  setText("cached", total ? format.share(cached / total) : "–");
  setText("cached-note", total ? "of " + format.count(total) + " tokens" : "no prompt yet");
  setText("failed", format.count(live.failed));
  $("failed").classList.toggle("bad", live.failed > 0);
  setText("failed-note", format.count(live.refused) + " refused");
}

// Mean of the last 5 seconds that are over.
function lately(rates) {
  const recent = rates.slice(-6, -1);
  return recent.reduce((sum, value) => sum + value, 0) / recent.length;
}

function fromCache(sources) {
  const total = SOURCES.reduce((sum, name) => sum + sources[name], 0);
  return { total, cached: total - sources.computed };
}

// Tokens per second

const CHART = { width: 600, height: 120 };
let shownRates = [];

function showThroughput(rates) {
  shownRates = rates.slice(0, -1);
  const top = niceCeiling(Math.max(1, ...shownRates));
  const x = (index) => (index / (shownRates.length - 1)) * CHART.width;
  const y = (value) => CHART.height - 1 - (value / top) * (CHART.height - 6);
  const points = shownRates.map((value, index) => x(index).toFixed(1) + " " + y(value).toFixed(1));
  $("spark-line").setAttribute("d", "M" + points.join("L"));
  $("spark-area").setAttribute("d", "M0 " + CHART.height + "L" + points.join("L") + "L" + CHART.width + " " + CHART.height + "Z");
  $("spark-grid").replaceChildren(...[0, 0.5, 1].map((part) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of [["x1", 0], ["x2", CHART.width], ["y1", y(part * top)], ["y2", y(part * top)]]) line.setAttribute(name, value);
    return line;
  }));
  const empty = !shownRates.some((value) => value > 0);
  $("spark-empty").hidden = !empty;
  $("spark-line").toggleAttribute("hidden", empty);
  setText("spark-max", empty ? "" : format.count(top));
  if ($("spark-cursor").hasAttribute("hidden")) {
    setText("rate-readout", empty ? "last 2 minutes" : "peak " + format.rate(Math.max(...shownRates)));
  }
}

function niceCeiling(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * size).find((step) => step >= value);
}

function readChart(event) {
  if (!shownRates.length) return;
  const box = $("spark").getBoundingClientRect();
  const last = shownRates.length - 1;
  const index = Math.min(last, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * last)));
  const cursor = $("spark-cursor");
  cursor.removeAttribute("hidden");
  cursor.setAttribute("x1", (index / last) * CHART.width);
  cursor.setAttribute("x2", (index / last) * CHART.width);
  setText("rate-readout", format.rate(shownRates[index]) + " tok/s, " + (last - index + 1) + " s ago");
}

// Tiers

function showTiers(live) {
  $("tiers").replaceChildren(...live.tiers.map((tier) => {
    const bar = element("div", { class: "bar" });
    let words = "not configured";
    if (tier.total) {
      bar.append(segment("used", tier.used / tier.total), segment("kept", tier.kept / tier.total));
      words = format.share(tier.used / tier.total) + " in use, " + format.share(tier.kept / tier.total) + " kept, of " +
        format.bytes(tier.total);
    } else if (tier.traffic) {
      words = format.bytes(tier.kept) + " kept, no limit";
    } else if (tier.weights) {
      words = format.bytes(tier.weights) + " of weights";
    }
    if (tier.traffic && !tier.traffic.available) words = "does not answer";
    const row = element("li", tier.total || tier.traffic ? {} : { class: "off" },
      element("div", { class: "name" }, element("span", {}, tier.name), element("span", {}, words)), bar);
    if (tier.traffic) row.append(element("small", {}, trafficWords(tier.traffic)));
    return row;
  }));
  const weights = live.tiers[0].weights;
  setText("memory-note", live.blocks ? format.count(live.blocks) + " blocks of " + live.block_size + " tokens" +
    (weights ? ", beside " + format.bytes(weights) + " of weights" : "") : "");
}

function trafficWords(traffic) {
  const words = [["in", traffic.in], ["out", traffic.out]].map(([way, moved]) => {
    const rate = moved.rate === null ? "" : " at " + format.bytes(moved.rate) + "/s";
    return way + " " + format.bytes(moved.bytes) + rate +
      (moved.rate !== null && moved.link ? " (" + format.share(moved.rate / moved.link) + " of link)" : "");
  });
  words.push(format.count(traffic.hit_tokens) + " tokens hit");
  if (traffic.failures) words.push(format.count(traffic.failures) + " failed");
  if (traffic.dropped) words.push(format.count(traffic.dropped) + " dropped");
  return words.join(" · ");
}

function segment(name, share) {
  const made = element("span", { class: name });
  made.style.width = Math.min(100, 100 * share).toFixed(2) + "%";
  return made;
}

// Sources of prompt tokens

const SOURCES = ["computed", "device", "host", "pool", "disk", "remote"];

function showSources(sources) {
  const { total, cached } = fromCache(sources);
  $("sources").replaceChildren(...SOURCES.filter((name) => sources[name]).map((name) => segment(name, sources[name] / total)));
  $("sources-legend").replaceChildren(...SOURCES.map((name) => element("li", {},
    element("i", { class: "key " + name }), name, element("b", {}, total ? format.share(sources[name] / total) : "–"),
    sources[name] ? format.count(sources[name]) : "")));
  setText("sources-note", total ? format.count(total) + " tokens, " + format.share(cached / total) + " from cache" : "no prompt yet");
  $("sources").setAttribute("aria-label", total
    ? SOURCES.map((name) => name + " " + format.share(sources[name] / total)).join(", ") : "no prompt tokens yet");
}

// Requests: one lane each on a shared axis that ends now, or where the last request ended

function showRequests(live) {
  const rows = live.requests.slice(0, ROWS);
  $("timeline").hidden = rows.length === 0;
  $("requests-empty").hidden = rows.length > 0;
  if (!rows.length) return;
  const ages = rows.map((row) => row.age - duration(row)); // how long ago each ended; 0 while it runs
  const end = Math.min(...ages); // seconds ago
  const wanted = Math.max(...rows.slice(0, 10).map((row) => row.age)) - end;
  const span = SPANS.find((size) => size >= wanted) || SPANS[SPANS.length - 1];
  showTicks(span, end);
  $("rows").replaceChildren(...rows.map((row) => requestRow(row, end, span)));
}

function duration(row) {
  return PHASES.reduce((sum, phase) => sum + row[phase], 0);
}

function showTicks(span, end) {
  const parts = [0, 0.25, 0.5, 0.75, 1];
  $("ticks").replaceChildren(...parts.map((part) => {
    const back = Math.round(span * (1 - part) + end);
    const tick = element("span", {}, back < 2 && part === 1 ? "now" : "−" + format.span(back));
    tick.style.left = 100 * part + "%";
    return tick;
  }));
}

const NAMES = { chat: "chat", completion: "completion", completions: "completion", responses: "response", response: "response" };

function requestRow(row, end, span) {
  const total = duration(row);
  const failed = row.status !== "ok" && row.status !== "running";
  const lane = element("span", { role: "cell", class: "lane " + (row.running ? "live" : failed ? "failed" : "ended") });
  let at = row.age; // seconds ago
  const spoken = [];
  for (const phase of PHASES) {
    const length = row[phase];
    if (!length) continue;
    spoken.push(phase + " " + format.seconds(length));
    const left = 1 - (at - end) / span;
    at -= length;
    const right = 1 - (at - end) / span;
    if (right <= 0) continue;
    const bar = element("i", { class: phase + (left < 0 ? " cut" : "") });
    bar.style.left = (100 * Math.max(0, left)).toFixed(3) + "%";
    bar.style.width = (100 * (right - Math.max(0, left))).toFixed(3) + "%";
    lane.append(bar);
  }
  if (!lane.childElementCount) lane.append(element("small", {}, row.age - total > end + span ? format.span(row.age) + " ago" : ""));
  lane.setAttribute("aria-label", spoken.join(", "));
  const made = element("div", { role: "row", class: "row", title: row.id + "\n" + spoken.join(", ") + "\n" + (row.running ? "running" : failed ? row.status : "finished") },
    element("span", { role: "cell", class: "who" }, element("span", failed ? { class: "failed" } : {}, failed ? row.status : NAMES[row.kind] || row.kind),
      element("code", {}, row.id.slice(-8))),
    cell(format.count(row.prompt_tokens)), cell(row.cached_tokens === null ? "–" : format.count(row.cached_tokens)),
    cell(format.count(row.output_tokens)), cell(format.seconds(total)), lane);
  return made;
}

function cell(text) {
  return element("span", { role: "cell", class: "num" }, text);
}

// Polling

let failures = 0;

async function poll() {
  try {
    const response = await fetch("/live", { headers: apiHeaders(), cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (response.status === 401) {
      banner("This server requires an API key: enter it in the chat's settings.", "warn");
    } else if (response.ok) {
      failures = 0;
      show(await response.json());
    } else {
      throw new Error("HTTP " + response.status);
    }
  } catch (error) {
    failures += 1;
    if (failures > 1) {
      $("state").dataset.state = "away";
      setText("state", STATES.away);
      banner("The server does not answer. This page keeps trying; the numbers below are not current.", "bad");
    }
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

$("example").textContent = "curl " + location.origin + "/v1/chat/completions -H 'Content-Type: application/json' \\\n" +
  "  -d '{\"model\": \"default\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'";
$("spark").addEventListener("pointermove", readChart);
$("spark").addEventListener("pointerleave", () => $("spark-cursor").setAttribute("hidden", ""));
poll();
