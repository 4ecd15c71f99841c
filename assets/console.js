// Progressive enhancement: live updates, charts, copy buttons, confirmation of deletions. Pages
// work without this file, too.
"use strict";

// Between two refreshes after events, and without events, in milliseconds.
const REFRESH_PAUSE_MS = 2000;
const REFRESH_ANYWAY_MS = 5000;
// A page that takes long to render is refreshed less often: it pauses for this multiple of the last
// refresh.
const REST_FACTOR = 10;
const MAX_REST_MS = 60000;
// How often a due refresh is checked for.
const TICK_MS = 250;
// Before a broken stream is opened again.
const RECONNECT_MS = 3000;
// A job's output may arrive shortly after its end.
const LAST_LOGS_MS = 3000;
// How long a button says that something was copied.
const COPIED_MS = 2000;
// So close to the end of the logs, new lines scroll into view, in pixels.
const LOG_END_PX = 40;
// Lines of logs that a page keeps.
const MAX_LOG_LINES = 2000;

// Without local storage the choice lasts as long as the page. Live updates are a matter of one tab.
const storageOf = (name) => (name === "fencepost-live" ? sessionStorage : localStorage);
function recall(name) {
  try {
    return storageOf(name).getItem(name);
  } catch {
    return null;
  }
}
function keep(name, value) {
  try {
    storageOf(name).setItem(name, value);
  } catch {
    // No local storage.
  }
}

const live = { isOn: recall("fencepost-live") !== "off", isOld: false, stream: null, isDue: false, isLooking: false, last: performance.now(), tookMs: 0 };
// `sent`: the server's position in each stream of each attempt, opaque to us.
const logs = { stream: null, sent: null, ending: null };

// The part that is refreshed: most of a page, or the one part that changes. A page with only a form
// has none.
const region = () => document.querySelector("[data-refresh]");
const isWatched = () => live.isOn && !live.isGone && !document.hidden;

// Whether a form of the page has unsent changes.
function isChanged(field) {
  if (field.type === "hidden") return false;
  if (field.matches("[type=checkbox], [type=radio]")) return field.checked !== field.defaultChecked;
  if (field.matches("select")) return field.selectedIndex !== Math.max([...field.options].findIndex((it) => it.defaultSelected), 0);
  return field.value !== field.defaultValue;
}
// A choice of rows, too, waits for what is done with it.
const FIELDS = "form[method=post] :is(input, select, textarea), form[data-select] input[name]";
const isBegun = () => [...region().querySelectorAll(FIELDS)].some(isChanged);

// Typed or selected text must survive a refresh; a form that waits for its answer must not change.
function isBusy() {
  const focused = document.activeElement;
  const isTyping = focused && region().contains(focused) && focused.matches("input, select, textarea");
  const selection = document.getSelection();
  return isTyping || (selection && !selection.isCollapsed) || region().querySelector("form[data-sent]") || isBegun();
}

function refresh() {
  if (!isWatched() || !region() || live.isLooking || isBusy()) return;
  live.isDue = false;
  live.isLooking = true;
  live.last = performance.now();
  htmx.trigger(region(), "refresh");
}

// If typing began after the request, its answer is dropped. Rows under the pointer stay where they
// are, as a click must meet what the eye has chosen; so do those of a page that is scrolled.
document.addEventListener("htmx:before:swap", (event) => {
  if (event.target !== region()) return;
  const table = document.querySelector("table[data-steady]");
  const isRead = table && !live.isWanted && (table.matches(":hover") || table.getBoundingClientRect().top < 0);
  if (isBusy()) {
    event.preventDefault();
    live.isDue = true;
  } else if (isRead && keepRows(table, event.detail.ctx.text)) {
    event.preventDefault();
  }
  live.isWanted = false;
});

// Brings the rows that are shown up to date, marks those that left, and says how many new ones there
// are. False: the page has changed in another way.
const asServed = new WeakMap();
function keepRows(table, html) {
  const next = new DOMParser().parseFromString(html, "text/html");
  const rows = [...next.querySelectorAll("table[data-steady] tbody tr")];
  if (rows.length === 0) return false;
  const left = new Set(table.querySelectorAll("tbody tr"));
  let fresh = 0;
  for (const row of rows) {
    const shown = document.getElementById(row.id);
    left.delete(shown);
    if (!shown) fresh += 1;
    // A script has changed times since: what was served before is compared. A row with the focus waits.
    else if (asServed.get(shown) !== row.innerHTML && !shown.contains(document.activeElement)) {
      asServed.set(shown, row.innerHTML);
      shown.innerHTML = row.innerHTML;
    }
  }
  for (const row of left) row.classList.add("left");
  const tabs = document.querySelector("nav.tabs");
  const nextTabs = next.querySelector("nav.tabs");
  if (tabs && nextTabs && !tabs.contains(document.activeElement)) tabs.innerHTML = nextTabs.innerHTML;
  const more = document.querySelector("[data-more]");
  more.hidden = fresh === 0;
  more.querySelector("button").textContent = `${fresh} new ${fresh === 1 ? "job" : "jobs"} ↑`;
  showTimes();
  return true;
}
document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-more]")) return;
  live.isWanted = true;
  scrollTo({ top: 0 });
  refresh();
});

// Reads the project's stream; each event only says that something has changed.
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
    // Opened again below, unless it was closed by hand.
  }
  if (live.stream === abort) {
    live.stream = null;
    setTimeout(follow, RECONNECT_MS);
  }
}

// A browser has few connections to one server: a hidden page keeps none, and an ended job needs
// none for its logs.
function follow() {
  const isWanted = isWatched() && region();
  if (isWanted && !live.stream) listen();
  if (!isWanted && live.stream) {
    const open = live.stream;
    live.stream = null;
    open.abort();
  }
  followLogs();
}

function followLogs() {
  const section = document.querySelector("[data-logs]");
  logs.sent ??= document.querySelector("[data-logs-sent]")?.dataset.logsSent;
  if (section && isWatched() && !logs.stream) {
    const after = new URLSearchParams({ after: logs.sent ?? "" });
    logs.stream = new EventSource(`${section.dataset.logs}?${after}`);
    logs.stream.addEventListener("log", (event) => {
      logs.sent = event.lastEventId;
      addLog(JSON.parse(event.data));
    });
  }
  if (logs.stream && !isWatched()) closeLogs();
  if (logs.stream && !section) logs.ending ??= setTimeout(closeLogs, LAST_LOGS_MS);
}

function closeLogs() {
  clearTimeout(logs.ending);
  logs.ending = null;
  logs.stream?.close();
  logs.stream = null;
}

// The time of day of a worker's clock, UTC.
function clock(millis) {
  const at = new Date(millis);
  return Number.isNaN(at.getTime()) ? "" : at.toISOString().slice(11, 23);
}

// Logs come as text and stay text.
function addLog(log) {
  const box = document.getElementById("logs");
  if (!box) return;
  document.getElementById("no-logs")?.remove();
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < LOG_END_PX;
  const line = document.createElement("div");
  line.className = log.stream === "stderr" ? "stderr" : "stdout";
  const whence = document.createElement("span");
  whence.className = "small";
  whence.textContent = `${clock(log.timestamp_ms)} attempt ${log.attempt} ${log.stream}`;
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = log.data ?? "(not shown)";
  line.append(whence, " ", text);
  box.append(line);
  while (box.childElementCount > MAX_LOG_LINES) box.firstElementChild.remove();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function setUpLive() {
  const button = document.querySelector("[data-live-switch]");
  if (!region() || !button) return;
  const word = button.querySelector("[data-live-word]");
  const show = () => {
    button.toggleAttribute("data-on", live.isOn && !live.isOld);
    if (!live.isOn) word.textContent = "Updates paused";
    else if (live.isOld) word.textContent = "Not up to date";
    else word.textContent = isBegun() ? "Waits for your form" : "Live updates";
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    live.isOn = !live.isOn;
    keep("fencepost-live", live.isOn ? "on" : "off");
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
    const since = performance.now() - live.last;
    const restMs = Math.min(live.tookMs * REST_FACTOR, MAX_REST_MS);
    show();
    if (since >= Math.max(live.isDue ? REFRESH_PAUSE_MS : REFRESH_ANYWAY_MS, restMs)) refresh();
  }, TICK_MS);
  follow();
}

// Choosing rows: all of a page, or from one to another with the shift key.
let lastPicked = null;
function setUpSelection() {
  const all = document.querySelector("[data-all]");
  if (all) all.hidden = false;
  showChosen();
}
function showChosen() {
  const bar = document.querySelector("[data-chosen]");
  if (!bar) return;
  const boxes = [...document.querySelectorAll("[data-select] input[name=ids]")];
  const chosen = boxes.filter((it) => it.checked).length;
  bar.toggleAttribute("data-some", chosen > 0);
  bar.querySelector("[data-chosen-count]").textContent = `${chosen} chosen:`;
  const all = document.querySelector("[data-all]");
  all.checked = chosen > 0 && chosen === boxes.length;
  all.indeterminate = chosen > 0 && chosen < boxes.length;
}
document.addEventListener("click", (event) => {
  const box = event.target.closest("[data-select] input[type=checkbox]");
  if (!box) return;
  const boxes = [...document.querySelectorAll("[data-select] input[name=ids]")];
  if (box.matches("[data-all]")) {
    for (const it of boxes) it.checked = box.checked;
  } else if (event.shiftKey && boxes.includes(lastPicked)) {
    const [from, to] = [boxes.indexOf(lastPicked), boxes.indexOf(box)].sort((one, other) => one - other);
    for (const it of boxes.slice(from, to + 1)) it.checked = box.checked;
  }
  if (!box.matches("[data-all]")) lastPicked = box;
  showChosen();
});

// The line suggests how its last word may go on.
document.addEventListener("input", (event) => {
  const line = event.target.closest("[data-search]");
  if (!line) return;
  const at = line.value.lastIndexOf(" ") + 1;
  const [before, word] = [line.value.slice(0, at), line.value.slice(at)];
  const all = JSON.parse(line.dataset.suggestions).filter((it) => it.startsWith(word) && it !== word);
  document.getElementById("suggested").replaceChildren(...all.map((it) => new Option(before + it, before + it)));
});

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
    } else {
      document.documentElement.dataset.theme = next;
    }
    try {
      localStorage.setItem("fencepost-theme", next);
    } catch {
      // Lasts as long as the page.
    }
    show();
    drawCharts(true);
  });
  show();
}

// Times are UTC in the page; here they become those of the visitor, unless UTC is chosen.
const times = { isLocal: recall("fencepost-times") !== "utc" };
function showTimes() {
  for (const it of document.querySelectorAll("time[datetime]")) {
    const at = new Date(it.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    it.dataset.utc ??= it.title || it.textContent;
    const local = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
    const text = times.isLocal ? local : it.dataset.utc;
    it.title = times.isLocal ? `${local} · ${it.dataset.utc}` : it.dataset.utc;
    if (it.hasAttribute("data-exact") && it.textContent !== text) it.textContent = text;
  }
}
function setUpTimes() {
  const button = document.querySelector("[data-times-switch]");
  const show = () => { if (button) button.textContent = `Times: ${times.isLocal ? "local" : "UTC"}`; };
  if (button) button.hidden = false;
  button?.addEventListener("click", () => {
    times.isLocal = !times.isLocal;
    keep("fencepost-times", times.isLocal ? "local" : "utc");
    show();
    showTimes();
    drawCharts(true);
  });
  show();
  showTimes();
}

// The palette: every page of the menu, a job by its id, or a search.
const palette = document.getElementById("palette");
function places(line) {
  const links = [...document.querySelectorAll("nav.side a")].map((it) => [it.firstChild.textContent.trim(), it.href]);
  links.push(["All projects", "/console/projects"], ["Account", "/console/account"], ["Documentation", "/docs/"]);
  const found = links.filter(([text]) => text.toLowerCase().includes(line.toLowerCase()));
  const jobs = document.getElementById("palette-list").dataset.jobs;
  if (line) found.push([`Search jobs: ${line}`, `${jobs}?${new URLSearchParams({ q: line })}`]);
  return found;
}
function showPlaces() {
  const list = document.getElementById("palette-list");
  const rows = places(document.getElementById("palette-line").value.trim()).map(([text, href], at) => {
    const row = document.createElement("li");
    row.role = "option";
    row.id = `place-${at}`;
    row.setAttribute("aria-selected", String(at === 0));
    const link = document.createElement("a");
    Object.assign(link, { href, textContent: text, tabIndex: -1 });
    row.append(link);
    return row;
  });
  list.replaceChildren(...rows);
  pointAt(0);
}
function pointAt(place) {
  const rows = [...document.querySelectorAll("#palette-list > li")];
  rows.forEach((it, at) => it.setAttribute("aria-selected", String(at === place)));
  rows[place]?.scrollIntoView({ block: "nearest" });
  document.getElementById("palette-line").setAttribute("aria-activedescendant", rows[place]?.id ?? "");
}
function openPalette() {
  if (!palette || palette.open) return;
  document.getElementById("palette-line").value = "";
  showPlaces();
  palette.showModal();
}
function setUpPalette() {
  const button = document.querySelector("[data-palette-open]");
  if (!palette || !button) return;
  button.hidden = false;
  button.addEventListener("click", openPalette);
  const line = document.getElementById("palette-line");
  const box = document.getElementById("keys-on");
  box.checked = keys.areOn;
  box.addEventListener("change", () => {
    keys.areOn = box.checked;
    keep("fencepost-keys", keys.areOn ? "on" : "off");
  });
  line.addEventListener("input", showPlaces);
  palette.addEventListener("click", (event) => { if (event.target === palette) palette.close(); });
  line.addEventListener("keydown", (event) => {
    const rows = [...document.querySelectorAll("#palette-list > li")];
    const place = rows.findIndex((it) => it.getAttribute("aria-selected") === "true");
    if (event.key === "ArrowDown") pointAt(Math.min(place + 1, rows.length - 1));
    else if (event.key === "ArrowUp") pointAt(Math.max(place - 1, 0));
    else if (event.key === "Enter") rows[place]?.querySelector("a").click();
    else return;
    event.preventDefault();
  });
}

// Keys, unless something is typed: `/`, `g` and a letter, `j` and `k`, and Enter on a row.
const GO = { o: "", j: "/jobs", q: "/queues", d: "/dead-letters", r: "/recurring", w: "/workers" };
const GO_MS = 1500;
let wentAt = -GO_MS;
const keys = { areOn: recall("fencepost-keys") !== "off" };
function moveRow(step) {
  const rows = [...document.querySelectorAll("main tbody tr:has(th a)")];
  const focused = rows.indexOf(document.activeElement?.closest("tr"));
  const at = focused >= 0 ? focused : rows.findIndex((it) => it.hasAttribute("data-row"));
  const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
  for (const it of rows) it.removeAttribute("data-row");
  next?.setAttribute("data-row", "");
  next?.querySelector("th a").focus();
}
document.addEventListener("keydown", (event) => {
  if ((event.metaKey || event.ctrlKey) && event.key === "k") {
    event.preventDefault();
    openPalette();
    return;
  }
  const isTyping = event.target.closest?.("input, select, textarea, dialog, [contenteditable]");
  if (!keys.areOn || isTyping || event.metaKey || event.ctrlKey || event.altKey || !palette) return;
  const base = document.getElementById("palette-list").dataset.jobs.replace(/\/jobs$/, "");
  if (performance.now() - wentAt < GO_MS && event.key in GO) {
    wentAt = -GO_MS;
    location.href = base + GO[event.key];
  } else if (event.key === "g") wentAt = performance.now();
  else if (event.key === "j") moveRow(1);
  else if (event.key === "k") moveRow(-1);
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    event.preventDefault();
    if (search) search.focus();
    else openPalette();
  }
});

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
  // By the length of a bucket.
  const place = { minute: "{HH}:{mm}", hour: "{MMM} {D}, {HH}:{mm}", day: "{MMM} {D}" }[data.slot];
  const mark = data.slot === "minute" ? "{HH}:{mm}" : null;
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui" };
  // As wide as its longest mark.
  const room = (_, marks) => Math.max(62, ...(marks || []).map((it) => 16 + 7 * it.length));
  box.plot = new uPlot({
    width,
    height: 190,
    cursor: { drag: { x: false, y: false } },
    tzDate: (seconds) => (times.isLocal ? new Date(seconds * 1000) : uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC")),
    axes: [mark ? { ...axis, values: mark } : axis, { ...axis, size: room, values: (_, marks) => marks.map(word) }],
    scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 10)] } },
    series: [{ label: times.isLocal ? "Time" : "UTC", value: place }, ...data.series.map((it) => ({ label: it.name, stroke: colour(it.tone), width: 1.75, spanGaps: false, points: { show: true, size: 4 }, value: (_, value) => word(value) }))],
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
    document.getElementById("said").textContent = copy.textContent;
    setTimeout(() => { copy.textContent = "Copy"; }, COPIED_MS);
  }
}, true);

// The last submitted form: errors are about its fields.
let sent = null;

// One click is enough: the form waits for its answer.
const buttonOf = (form) => form.querySelector("button:not([type=button])");
// With the name of its target, where a page has several.
const questionOf = (form) => [form.dataset.confirm, buttonOf(form)?.getAttribute("aria-label")].filter(Boolean).join("\n");
function release(form) {
  delete form.dataset.sent;
  const button = buttonOf(form);
  if (button) button.disabled = false;
}
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sent || (form.dataset.confirm && !window.confirm(questionOf(form)))) {
    event.preventDefault();
    event.stopPropagation();
    return;
  }
  // Messages about the previous submission are outdated.
  document.getElementById("problem")?.replaceChildren();
  document.querySelector("main > .done")?.remove();
  if (form.method !== "post") return;
  sent = form;
  markFields();
  form.dataset.sent = "true";
  const button = buttonOf(form);
  if (button) setTimeout(() => { button.disabled = true; }, 0);
}, true);
document.addEventListener("htmx:finally:request", (event) => {
  if (event.target instanceof HTMLFormElement) release(event.target);
  if (event.target === region()) live.isLooking = false;
});
// A page from the browser's back-forward cache enables its buttons again, and resumes updates.
window.addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  live.isGone = false;
  for (const form of document.forms) release(form);
  follow();
});

// What is shown is as old as the last answer: it must not look like news.
function showAge(isOld) {
  live.isOld = isOld;
  region()?.toggleAttribute("data-old", isOld);
}

function writeProblem(place, text) {
  const shown = document.createElement("p");
  shown.className = "failure";
  shown.textContent = text;
  document.getElementById(place)?.replaceChildren(shown);
}

// No answer at all, or a failed refresh: the page stays as it is.
document.addEventListener("htmx:error", (event) => {
  if (event.target instanceof HTMLFormElement) {
    writeProblem("problem", "The server did not answer: look whether it was done before you try again.");
    showProblem();
  } else {
    writeProblem("lost", "The server does not answer. Trying again…");
    showAge(true);
  }
});
document.addEventListener("htmx:response:error", (event) => {
  if (event.target !== region()) return;
  const { status } = event.detail.ctx.response;
  if (status === 403 || status === 404) {
    live.isGone = true;
    follow();
    writeProblem("lost", "This is not there any more, or not for you.");
    return;
  }
  writeProblem("lost", `This page could not be brought up to date (${status}). Trying again…`);
  showAge(true);
});
document.addEventListener("htmx:after:request", (event) => {
  if (event.target === region()) live.tookMs = performance.now() - live.last;
  if (event.detail.ctx.response.status !== 200) return;
  document.getElementById("lost")?.replaceChildren();
  showAge(false);
});
document.addEventListener("htmx:after:swap", () => {
  follow();
  drawCharts(false);
  showTimes();
  setUpSelection();
  markFields();
  showProblem();
});

// The API names fields by their JSON names; visitors know their labels.
let mistakes = 0;
function markFields() {
  for (const field of document.querySelectorAll("[aria-errormessage]")) {
    if (document.getElementById(field.getAttribute("aria-errormessage"))) continue;
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
  for (const shown of document.querySelectorAll("[data-field]:not([id])")) {
    mistakes += 1;
    shown.id = `mistake-${mistakes}`;
    const name = shown.dataset.field.split("[")[0];
    const form = shown.closest("form") ?? sent ?? document.querySelector("main form[method=post]");
    const field = form?.isConnected && [...form.elements].find((it) => it.name === name && it.type !== "hidden");
    if (!field) continue;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", shown.id);
    const label = field.type === "checkbox" ? field.closest("fieldset")?.querySelector("legend") : field.labels[0];
    const words = [...label?.childNodes ?? []].filter((it) => !it.contains(field)).map((it) => it.textContent).join("").trim();
    if (words) shown.textContent = words;
  }
}

// Errors are scrolled into view and announced, wherever the button was.
function showProblem() {
  const shown = document.querySelector("#problem > *");
  if (!shown || shown.dataset.isShown) return;
  shown.dataset.isShown = "true";
  shown.tabIndex = -1;
  shown.focus({ preventScroll: true });
  shown.scrollIntoView({ block: "center" });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(true));
addEventListener("resize", () => drawCharts(false));

// Keyboard focus moves to the message about what was done.
const done = document.querySelector("main > .done");
if (done) {
  done.tabIndex = -1;
  done.focus({ preventScroll: true });
}
// On a narrow screen the links are one scrolling line.
document.querySelector("nav.side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

const zones = document.getElementById("zones");
if (zones) for (const zone of Intl.supportedValuesOf("timeZone")) zones.append(new Option(zone));

// A message is shown once: a reload does not repeat it.
const here = new URL(location.href);
if (here.searchParams.has("done")) {
  here.searchParams.delete("done");
  history.replaceState(null, "", here);
}

// The secret of a mailed link is behind its #: the page posts it, and the address forgets it.
function openMailedLink() {
  const form = document.querySelector("form[data-mailed]");
  const secret = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!form || !secret) return;
  history.replaceState(null, "", location.pathname);
  form.elements.token.value = secret;
  form.submit();
}
addEventListener("hashchange", openMailedLink);

// A form that needs a passkey has the server's challenge, and sends the browser's answer.
function setUpPasskeys() {
  if (!window.PublicKeyCredential?.parseCreationOptionsFromJSON) return;
  document.querySelector("[data-no-passkeys]")?.remove();
  for (const form of document.querySelectorAll("form[data-passkey]")) {
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      answerWithPasskey(form);
    });
  }
}
async function answerWithPasskey(form) {
  const options = JSON.parse(form.dataset.options);
  try {
    const credential = form.dataset.passkey === "create"
      ? await navigator.credentials.create({ publicKey: PublicKeyCredential.parseCreationOptionsFromJSON(options) })
      : await navigator.credentials.get({ publicKey: PublicKeyCredential.parseRequestOptionsFromJSON(options) });
    form.elements.credential.value = JSON.stringify(credential.toJSON());
  } catch (error) {
    writeProblem("problem", error.name === "InvalidStateError" ? "This device has a passkey of your account already." : "Your browser gave no passkey.");
    showProblem();
    release(form);
    return;
  }
  form.submit();
}

// A menu closes with Escape, and when something else is clicked.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.switch[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
document.addEventListener("keydown", (event) => {
  const menu = document.querySelector("details.switch[open]");
  if (event.key !== "Escape" || !menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
});

openMailedLink();
setUpPasskeys();
setUpTheme();
setUpTimes();
setUpPalette();
setUpLive();
setUpSelection();
markFields();
drawCharts(false);
