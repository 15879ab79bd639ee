// The chat box: streams from /v1/chat/completions. The conversation lives in this tab only.
"use strict";

const conversation = [];
let running = null; // the AbortController of the answer that streams now

async function send(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user").textContent = text;
  const target = addMessage("assistant");
  const message = target.parentElement;
  message.classList.add("running");
  $("log").setAttribute("aria-busy", "true");
  running = new AbortController();
  showRunning(true);
  const answer = { text: "", started: performance.now(), first: 0, usage: null, reason: null };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...apiHeaders() },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response.body)) {
      takeIn(event, answer, target);
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(message, error.message || String(error));
    else answer.reason = "stopped";
  }
  message.classList.remove("running");
  $("log").removeAttribute("aria-busy");
  if (answer.text) conversation.push({ role: "assistant", content: answer.text });
  else if (!message.classList.contains("error")) target.textContent = answer.reason === "stopped" ? "" : "(empty answer)";
  message.append(element("p", { class: "note" }, summary(answer)));
  running = null;
  showRunning(false);
  follow();
}

function requestBody() {
  const body = { model: "default", messages: conversation, stream: true, stream_options: { include_usage: true } };
  const temperature = parseFloat($("temperature").value);
  const limit = parseInt($("max-tokens").value, 10);
  if (Number.isFinite(temperature)) body.temperature = temperature;
  if (limit > 0) body.max_tokens = limit;
  return body;
}

function takeIn(event, answer, target) {
  if (event.error) throw new Error(event.error.message);
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices && event.choices[0];
  if (!choice) return;
  if (choice.finish_reason) answer.reason = choice.finish_reason;
  const piece = choice.delta && choice.delta.content;
  if (!piece) return;
  answer.first = answer.first || performance.now();
  answer.text += piece;
  const stay = nearEnd();
  target.append(piece);
  if (stay) follow();
}

// Server-sent events of a fetch body, parsed, up to [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const message = JSON.parse(text).error.message;
    return response.status === 401 ? message + " Put the key in the settings below." : message;
  } catch {
    return "The server answered " + response.status + ".";
  }
}

function summary(answer) {
  const parts = [];
  if (answer.reason === "stopped") parts.push("stopped");
  if (answer.reason === "length") parts.push("cut at the token limit");
  if (answer.first) parts.push("first token " + format.seconds((answer.first - answer.started) / 1000));
  if (answer.usage) {
    const { completion_tokens: out, prompt_tokens: prompt, prompt_tokens_details: details } = answer.usage;
    const seconds = (performance.now() - answer.first) / 1000;
    parts.push(format.count(out) + " tokens" + (out > 1 && seconds > 0 ? " at " + format.rate((out - 1) / seconds) + " tok/s" : ""));
    parts.push("prompt " + format.count(prompt) + (details && details.cached_tokens ? ", " + format.count(details.cached_tokens) + " cached" : ""));
  }
  return parts.join(" · ");
}

function fail(message, text) {
  message.classList.add("error");
  message.querySelector(".text").textContent = text === "Failed to fetch" ? "The server does not answer." : text;
  conversation.pop(); // the question was not answered: it may be asked again
}

function addMessage(role) {
  $("log-empty").hidden = true;
  const text = element("div", { class: "text" });
  const hidden = element("span", { class: "hidden" }, role === "user" ? "You said:" : "The model said:");
  $("log").append(element("div", { class: "message " + role }, hidden, text));
  follow();
  return text;
}

function nearEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function follow() {
  $("log").scrollTop = $("log").scrollHeight;
}

function showRunning(on) {
  const focused = document.activeElement === $("stop") || document.activeElement === $("send");
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (focused) (on ? $("stop") : $("prompt")).focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  send(text);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});

$("stop").addEventListener("click", () => running && running.abort());

$("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation.length = 0;
  for (const message of $("log").querySelectorAll(".message")) message.remove();
  $("log-empty").hidden = false;
  $("prompt").focus();
});

const FOLDED = "spillover-chat-folded";

function fold(folded) {
  document.querySelector("main").classList.toggle("folded", folded);
  $("fold").setAttribute("aria-expanded", String(!folded));
  setText("fold", folded ? "Show" : "Hide");
  if (folded) sessionStorage.setItem(FOLDED, "1");
  else sessionStorage.removeItem(FOLDED);
}

$("fold").addEventListener("click", () => fold(!document.querySelector("main").classList.contains("folded")));
if (sessionStorage.getItem(FOLDED)) fold(true);

$("key").value = sessionStorage.getItem(KEY) || "";
$("key").addEventListener("input", () => sessionStorage.setItem(KEY, $("key").value.trim()));
