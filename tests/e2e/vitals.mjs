// How soon each page of the console shows what it is about, and how much it moves afterwards: the
// largest contentful paint and the cumulative layout shift, with an empty cache each time.

import { openWindow, signUp, startBrowser, startServer, until } from "./stage.mjs";

const JOBS = Number(process.env.JOBS || 1_000_000);
// Each page is opened from an address of its own, of 250.
const ROUNDS = Math.min(Number(process.env.ROUNDS || 5), 9);
const BATCH_JOBS = 500;
// Requests that fill the queues at a time.
const REQUESTS = 8;
// How long a page may move after it was loaded.
const SETTLING_MS = 1_500;

const server = await startServer();
const browser = await startBrowser();
const page = await openWindow(browser);
const { base, api } = await signUp(page, server.url, "ada@example.com", "Acme");

async function fill() {
  for (let left = JOBS / BATCH_JOBS / REQUESTS; left > 0; left -= 1) {
    const jobs = Array.from({ length: BATCH_JOBS }, (_, n) => ({ job_type: `type-${n % 20}`, queue: `queue-${n % 50}`, payload: { n } }));
    await api.post("/jobs/batch", { jobs });
  }
}
await Promise.all(Array.from({ length: REQUESTS }, fill));
const { id: workflow } = await api.post("/workflows", { name: "import", jobs: [
  { key: "fetch", job_type: "fetch" }, { key: "store", job_type: "store", depends_on: ["fetch"] },
] });
for (let n = 0; n < 40; n += 1) {
  await api.enqueue({ job_type: "mail", queue: "mail", max_attempts: 1 });
  const leased = await api.lease("mailer", "mail");
  await leased.log(1, "connecting\n");
  await leased.fail({ type: `Refused${n % 4}`, message: `connection ${n} refused`, stack_trace: "at line 1" });
}
await api.put("/recurring/nightly", { job_type: "report", cron_expression: "30 2 * * *" });
const { dead_letters: [letter] } = await until("a dead letter", async () => {
  const found = await api.get("/dead-letters");
  return found.dead_letters.length && found;
});
let session = await page.context().storageState();

// What the browser has measured since the page was opened.
const measured = (settling) => new Promise((resolve) => {
  let [paint, shift] = [0, 0];
  new PerformanceObserver((list) => { for (const it of list.getEntries()) paint = it.startTime; })
    .observe({ type: "largest-contentful-paint", buffered: true });
  new PerformanceObserver((list) => { for (const it of list.getEntries()) if (!it.hadRecentInput) shift += it.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve({ paint, shift }), settling);
});

const median = (all) => all.sort((a, b) => a - b)[Math.floor(all.length / 2)];
const routes = [
  "", "/jobs", "/jobs?q=queue:queue-7", `/jobs/${letter.job.id}`, "/jobs/new", "/queues", "/queues/queue-7", "/dead-letters", "/dead-letters/list",
  "/job-types", "/job-types/type-7", "/workers", "/recurring", "/recurring/s/nightly", "/workflows", `/workflows/${workflow}`, "/batches",
  "/operations", "/alarms", "/webhooks", "/keys", "/members", "/limits", "/audit-log", "/settings",
];
console.log("| page | largest paint, median | longest | layout shift, largest |\n|---|---:|---:|---:|");
for (const route of routes) {
  const [paints, shifts] = [[], []];
  for (let round = 0; round < ROUNDS; round += 1) {
    const cold = await openWindow(browser, { storageState: session });
    const answer = await cold.goto(base + route, { waitUntil: "load" });
    if (answer.status() !== 200 || !cold.url().startsWith(base)) throw new Error(`${route}: ${answer.status()} at ${cold.url()}`);
    const { paint, shift } = await cold.evaluate(measured, SETTLING_MS);
    paints.push(paint);
    shifts.push(shift);
    session = await cold.context().storageState();
    await cold.context().close();
  }
  const name = route.replace(letter.job.id, "JOB").replace(workflow, "WORKFLOW") || "overview";
  console.log(`| \`${name}\` | ${Math.round(median(paints))} ms | ${Math.round(Math.max(...paints))} ms | ${Math.max(...shifts).toFixed(3)} |`);
}
await browser.close();
await server.stop();
