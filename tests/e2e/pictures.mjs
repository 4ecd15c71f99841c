// Pictures of the console for docs/pictures/: a project with jobs in it, some of them stuck.

import path from "node:path";
import { fileURLToPath } from "node:url";
import { openWindow, signUp, startBrowser, startServer } from "./stage.mjs";

const FOLDER = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../docs/pictures");
// How long jobs run before the picture is taken.
const SECONDS = Number(process.env.SECONDS || 240);

const server = await startServer();
const browser = await startBrowser();
const page = await openWindow(browser);
const { base, api } = await signUp(page, server.url, "ada@example.com", "Acme");
const workers = { mail: ["mail-1", "mail-2"], images: ["images-1"], billing: ["billing-1"] };
for (const [queue, names] of Object.entries(workers)) {
  for (const name of names) {
    await api.post("/workers/register", {
      worker_id: name, queues: [queue], job_types: [`${queue}.run`], concurrency: 8, hostname: `${name}.acme.internal`, sdk_version: "acme/2.4.1",
    });
  }
}
const until = Date.now() + SECONDS * 1000;
async function work(queue, name, failing) {
  while (Date.now() < until) {
    const leased = await api.lease(name, queue, 1);
    if (!leased) continue;
    await new Promise((resolve) => setTimeout(resolve, 20 + Math.random() * 60));
    if (Math.random() < failing) {
      const port = 1 + Math.floor(Math.random() * 9);
      await leased.fail({ type: "SmtpRefused", message: `smtp-${port}.acme.internal refused the connection`, stack_trace: "File \"mail.py\", line 41, in send" });
    } else {
      await leased.succeed({ ok: true });
    }
  }
}
async function produce() {
  for (let round = 0; Date.now() < until; round += 1) {
    const jobs = Object.keys(workers).flatMap((queue) => Array.from({ length: 2 + Math.floor(4 * Math.random()) }, (_, n) => ({
      job_type: `${queue}.run`, queue, max_attempts: 2, payload: { customer: 1000 + n, locale: "en" }, tags: { customer: String(n) },
      retry: { strategy: "constant", initial_seconds: 1, jitter_seconds: 0 },
    })));
    await api.post("/jobs/batch", { jobs });
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
await api.post("/queues/reports/pause");
for (let n = 0; n < 12; n += 1) await api.enqueue({ job_type: "report.build", queue: "reports", payload: { day: n } });
for (let n = 0; n < 31; n += 1) await api.enqueue({ job_type: "invoice.pdf", queue: "invoices", payload: { invoice: n } });
await api.patch("/queues/images", { max_concurrency: 4 });
await api.put("/recurring/nightly-report", { job_type: "report.build", queue: "reports", cron_expression: "30 2 * * *", timezone: "Europe/Berlin" });
await Promise.all([
  produce(), work("mail", "mail-1", 0.3), work("mail", "mail-2", 0.3), work("images", "images-1", 0), work("billing", "billing-1", 0.02),
]);
const { dead_letters: [letter] } = await api.get("/dead-letters?queue=mail");
const shots = [
  ["overview-light", "", "light"], ["overview-dark", "", "dark"], ["job", `/jobs/${letter.job.id}`, "light"],
  ["dead-letters", "/dead-letters", "light"], ["queues", "/queues", "light"],
];
for (const [name, route, colorScheme] of shots) {
  await page.emulateMedia({ colorScheme });
  await page.goto(base + route);
  await page.waitForTimeout(500);
  await page.screenshot({ path: path.join(FOLDER, `console-${name}.png`) });
}
await browser.close();
await server.stop();
