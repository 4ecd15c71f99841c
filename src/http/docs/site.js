"use strict";

// Commands are for the server that shows them.
const DEV_URL = "http://127.0.0.1:7070";
for (const code of document.querySelectorAll("pre code")) {
  if (code.textContent.includes(DEV_URL)) {
    code.textContent = code.textContent.replaceAll(DEV_URL, location.origin);
  }
}

// Copy buttons.
for (const pre of document.querySelectorAll("pre")) {
  const frame = document.createElement("div");
  frame.className = "code";
  pre.replaceWith(frame);
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  frame.append(pre, button);
}

// A choice of language counts for all tabs, on all pages.
const choose = (name) => {
  for (const input of document.querySelectorAll(".tabs > input")) {
    if (input.value === name) input.checked = true;
  }
};
const chosen = localStorage.getItem("language");
if (chosen) choose(chosen);
document.addEventListener("change", ({ target }) => {
  if (!target.matches(".tabs > input")) return;
  localStorage.setItem("language", target.value);
  const top = target.getBoundingClientRect().top;
  choose(target.value);
  scrollBy(0, target.getBoundingClientRect().top - top);
});

// Search: each word must be in the section; titles count most.
const MAX_RESULTS = 12;
const box = document.querySelector(".search");
const input = document.getElementById("search");
const results = document.getElementById("results");
const count = box.querySelector(".count");
box.hidden = false;
let index;

function score(section, words) {
  const title = `${section.title} ${section.page}`.toLowerCase();
  const text = section.words.toLowerCase();
  let sum = 0;
  for (const word of words) {
    const inTitle = title.split(word).length - 1;
    const inText = Math.min(text.split(word).length - 1, 5);
    if (inTitle + inText === 0) return 0;
    sum += inTitle * 10 + inText + (section.title.toLowerCase() === word ? 20 : 0);
  }
  return sum * section.weight;
}

function around(text, word) {
  const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
  return (at > 0 ? "…" : "") + text.slice(at, at + 120);
}

// Questions are asked with words that say nothing, and with other names of the same things.
const FILLERS = new Set("a an and can do does for how i in is it my not of on the to what why with".split(" "));
const SYNONYMS = new Map(Object.entries({ email: "mail", "e-mail": "mail", emails: "mail", throttle: "limit", throttling: "limit", running: "run" }));

function meant(text) {
  const words = text.toLowerCase().split(/[\s?]+/).filter(Boolean);
  const specific = words.filter((word) => !FILLERS.has(word));
  return (specific.length ? specific : words).map((word) => SYNONYMS.get(word) ?? word);
}

async function search() {
  const words = meant(input.value);
  index ??= fetch("/docs/search.json").then((reply) => reply.json());
  const sections = words.length ? await index : [];
  const found = sections
    .map((section) => ({ section, score: score(section, words) }))
    .filter((it) => it.score > 0)
    .sort((a, b) => b.score - a.score)
    .slice(0, MAX_RESULTS);
  results.replaceChildren(
    ...found.map(({ section }) => {
      const link = document.createElement("a");
      link.href = section.path;
      const title = section.title === section.page ? section.page : `${section.page} › ${section.title}`;
      link.append(title);
      const text = document.createElement("small");
      text.textContent = around(section.words, words[0]);
      link.append(text);
      const item = document.createElement("li");
      item.append(link);
      return item;
    }),
  );
  count.textContent = words.length ? `${found.length} results` : "";
}

input.addEventListener("input", search);
box.addEventListener("keydown", (event) => {
  const links = [...results.querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  if (event.key === "Escape") {
    results.replaceChildren();
    input.focus();
  } else if (event.key === "Enter" && at < 0 && links.length) {
    links[0].click();
  } else if (event.key === "ArrowDown" && links.length) {
    links[Math.min(at + 1, links.length - 1)].focus();
    event.preventDefault();
  } else if (event.key === "ArrowUp" && at >= 0) {
    (links[at - 1] ?? input).focus();
    event.preventDefault();
  }
});
document.addEventListener("click", ({ target }) => {
  if (!box.contains(target)) results.replaceChildren();
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) {
    input.focus();
    event.preventDefault();
  }
});
