// What pages do beyond being read: they follow what happens, draw charts, copy, ask before they delete. Each of them works
// without this file, too.
"use strict";

// Between two looks while things happen, and when nothing is heard, in milliseconds.
const REFRESH_PAUSE_MS = 2000;
const REFRESH_ANYWAY_MS = 5000;
// Before a stream that has broken is opened again.
const RECONNECT_MS = 3000;
// Lines of logs that a page keeps.
const MAX_LOG_LINES = 2000;

const live = { isOn: sessionStorage.getItem("fencepost-live") !== "off", stream: null, isDue: false, last: Date.now() };
const logs = { stream: null, seen: new Set() };

// What looks again: most of a page, or the one part of it that changes. A page with a form has none.
const region = () => document.querySelector("[data-refresh]");
const isWatched = () => live.isOn && !live.isGone && !document.hidden;

// Somebody who types, or marks a text, must not have it taken away.
function isBusy() {
  const focused = document.activeElement;
  const isTyping = focused && region().contains(focused) && focused.matches("input, select, textarea");
  const selection = document.getSelection();
  return isTyping || (selection && !selection.isCollapsed);
}

function refresh() {
  if (!isWatched() || !region() || isBusy()) return;
  live.isDue = false;
  live.last = Date.now();
  htmx.trigger(region(), "refresh");
}

// Reads the project's stream; what it says is only that something has happened.
async function listen() {
  const url = document.getElementById("main").dataset.stream;
  const abort = new AbortController();
  live.stream = abort;
  try {
    const answer = await fetch(url, { signal: abort.signal, headers: { accept: "text/event-stream" } });
    if (!answer.ok || !answer.body) throw new Error(String(answer.status));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      if (value.includes("data:")) live.isDue = true;
    }
  } catch {
    // It is opened again below, unless somebody has closed it.
  }
  if (live.stream === abort) {
    live.stream = null;
    setTimeout(follow, RECONNECT_MS);
  }
}

// A browser has few connections to one server: a page that nobody sees keeps none, and one that shows a job that has ended
// needs none for its logs.
function follow() {
  const isWanted = isWatched() && region();
  if (isWanted && !live.stream) listen();
  if (!isWanted && live.stream) {
    const open = live.stream;
    live.stream = null;
    open.abort();
  }
  const source = isWatched() && document.querySelector("[data-logs]")?.dataset.logs;
  if (source && !logs.stream) {
    logs.stream = new EventSource(source);
    logs.stream.addEventListener("log", (event) => addLog(JSON.parse(event.data)));
  }
  if (!source && logs.stream) {
    logs.stream.close();
    logs.stream = null;
  }
}

// Logs come as text and stay text.
function addLog(log) {
  const box = document.getElementById("logs");
  const key = `${log.attempt}.${log.stream}.${log.sequence}`;
  if (!box || logs.seen.has(key)) return;
  document.getElementById("no-logs")?.remove();
  // The stream begins with all that the page shows already.
  if (logs.seen.size === 0) box.replaceChildren();
  logs.seen.add(key);
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const line = document.createElement("div");
  line.className = log.stream === "stderr" ? "stderr" : "stdout";
  const whence = document.createElement("span");
  whence.className = "small";
  whence.textContent = `${log.attempt} ${log.stream}`;
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = log.data;
  line.append(whence, " ", text);
  box.append(line);
  while (box.childElementCount > MAX_LOG_LINES) box.firstElementChild.remove();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function setUpLive() {
  const button = document.querySelector("[data-live-switch]");
  if (!region() || !button) return;
  const show = () => {
    button.toggleAttribute("data-on", live.isOn);
    button.querySelector("[data-live-word]").textContent = live.isOn ? "Live updates" : "Updates paused";
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    live.isOn = !live.isOn;
    sessionStorage.setItem("fencepost-live", live.isOn ? "on" : "off");
    show();
    follow();
    refresh();
  });
  show();
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("pagehide", () => {
    live.isGone = true;
    follow();
  });
  setInterval(() => {
    const since = Date.now() - live.last;
    if ((live.isDue && since >= REFRESH_PAUSE_MS) || since >= REFRESH_ANYWAY_MS) refresh();
  }, 250);
  follow();
}

function setUpTheme() {
  const button = document.querySelector("[data-theme-switch]");
  if (!button) return;
  const order = ["auto", "light", "dark"];
  const now = () => document.documentElement.dataset.theme || "auto";
  const show = () => { button.textContent = `Theme: ${now()}`; };
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(now()) + 1) % order.length];
    if (next === "auto") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("fencepost-theme");
    } else {
      document.documentElement.dataset.theme = next;
      localStorage.setItem("fencepost-theme", next);
    }
    show();
    drawCharts(true);
  });
  show();
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const words = {
  jobs: (value) => (value == null ? "–" : String(value)),
  ms: (value) => {
    if (value == null) return "–";
    if (value < 1000) return `${Math.round(value)} ms`;
    return value < 60000 ? `${(value / 1000).toFixed(1)} s` : `${(value / 60000).toFixed(1)} min`;
  },
};

function draw(box) {
  const data = JSON.parse(box.dataset.chart);
  const values = [data.x, ...data.series.map((it) => it.y)];
  const width = Math.max(box.clientWidth, 240);
  if (box.plot) {
    box.plot.setSize({ width, height: 190 });
    box.plot.setData(values);
    return;
  }
  const word = words[data.unit];
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui" };
  box.plot = new uPlot({
    width,
    height: 190,
    cursor: { drag: { x: false, y: false } },
    // As the table below has it.
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    axes: [{ ...axis, values: "{HH}:{mm}" }, { ...axis, size: 62, values: (_, marks) => marks.map(word) }],
    scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 10)] } },
    series: [{ label: "UTC", value: "{HH}:{mm}" }, ...data.series.map((it) => ({ label: it.name, stroke: colour(it.tone), width: 1.75, spanGaps: false, points: { show: true, size: 4 }, value: (_, value) => word(value) }))],
  }, values, box);
}

function drawCharts(isAnew) {
  for (const box of document.querySelectorAll("[data-chart]")) {
    if (isAnew && box.plot) {
      box.plot.destroy();
      box.plot = null;
    }
    if (box.plot && box.lastChart === box.dataset.chart && box.lastWidth === box.clientWidth) continue;
    box.lastChart = box.dataset.chart;
    box.lastWidth = box.clientWidth;
    draw(box);
  }
}

document.addEventListener("click", async (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    const text = document.querySelector(copy.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  }
}, true);

// The form that was sent last: what went wrong is about its fields.
let sent = null;

// One click is enough: the form waits for its answer.
const buttonOf = (form) => form.querySelector("button:not([type=button])");
function release(form) {
  delete form.dataset.sent;
  const button = buttonOf(form);
  if (button) button.disabled = false;
}
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sent || (form.dataset.confirm && !window.confirm(form.dataset.confirm))) {
    event.preventDefault();
    event.stopPropagation();
    return;
  }
  document.getElementById("problem")?.replaceChildren();
  if (form.method !== "post") return;
  sent = form;
  markFields();
  form.dataset.sent = "true";
  const button = buttonOf(form);
  if (button) setTimeout(() => { button.disabled = true; }, 0);
}, true);
document.addEventListener("htmx:finally:request", (event) => event.target instanceof HTMLFormElement && release(event.target));
// A page that comes back from the browser's memory has its buttons again, and follows.
window.addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  live.isGone = false;
  for (const form of document.forms) release(form);
  follow();
});

function tell(place, text) {
  const told = document.createElement("p");
  told.className = "failure";
  told.textContent = text;
  document.getElementById(place)?.replaceChildren(told);
}

// Nothing was answered at all, or a look was answered with a failure: the page stays as it is.
document.addEventListener("htmx:error", (event) => {
  if (event.target instanceof HTMLFormElement) {
    tell("problem", "The server did not answer: look whether it was done before you try again.");
    showProblem();
  } else {
    tell("lost", "The server does not answer. Trying again…");
  }
});
document.addEventListener("htmx:response:error", (event) => {
  if (event.target === region()) tell("lost", `This page could not be brought up to date (${event.detail.ctx.response.status}). Trying again…`);
});
document.addEventListener("htmx:after:request", (event) => {
  if (event.detail.ctx.response.status === 200) document.getElementById("lost")?.replaceChildren();
});
document.addEventListener("htmx:after:swap", () => {
  follow();
  drawCharts(false);
  markFields();
  showProblem();
});

// The API names a field as it knows it; somebody who looks at a form knows it by its label.
let mistakes = 0;
function markFields() {
  for (const field of document.querySelectorAll("[aria-errormessage]")) {
    if (document.getElementById(field.getAttribute("aria-errormessage"))) continue;
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
  for (const told of document.querySelectorAll("[data-field]:not([id])")) {
    mistakes += 1;
    told.id = `mistake-${mistakes}`;
    const name = told.dataset.field.split("[")[0];
    const form = told.closest("form") ?? sent ?? document.querySelector("main form[method=post]");
    const field = form?.isConnected && [...form.elements].find((it) => it.name === name && it.type !== "hidden");
    if (!field) continue;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", told.id);
    const label = field.type === "checkbox" ? field.closest("fieldset")?.querySelector("legend") : field.labels[0];
    const words = [...label?.childNodes ?? []].filter((it) => !it.contains(field)).map((it) => it.textContent).join("").trim();
    if (words) told.textContent = words;
  }
}

// What went wrong is seen and heard, wherever on the page the button was.
function showProblem() {
  const told = document.querySelector("#problem > *");
  if (!told || told.dataset.isShown) return;
  told.dataset.isShown = "true";
  told.tabIndex = -1;
  told.focus({ preventScroll: true });
  told.scrollIntoView({ block: "center" });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(true));
addEventListener("resize", () => drawCharts(false));

// What a button has said is said once: a reload does not say it again.
const here = new URL(location.href);
if (here.searchParams.has("done")) {
  here.searchParams.delete("done");
  history.replaceState(null, "", here);
}

setUpTheme();
setUpLive();
markFields();
drawCharts(false);
