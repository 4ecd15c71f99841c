// What every test stands on: a server of its own with load on it, a browser, people and their projects.

import { spawn, spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, chmodSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../..");
const BINARY = process.env.FENCEPOST_BINARY || path.join(ROOT, "target/debug/fencepost");
const BROWSERS = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
export const PASSWORD = "quiet otters borrow umbrellas";

const freePort = () => new Promise((resolve) => {
  const server = net.createServer();
  server.listen(0, "127.0.0.1", () => {
    const { port } = server.address();
    server.close(() => resolve(port));
  });
});

// Asks again until it is so: what is waited for happens on the server, or on the page.
export async function until(what, isSo, seconds = 20) {
  const end = Date.now() + seconds * 1000;
  for (;;) {
    const it = await isSo();
    if (it) return it;
    if (Date.now() > end) throw new Error(`${what}: not within ${seconds} s`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

// Starts `fencepost dev` in a folder of its own.
export async function startServer() {
  const folder = mkdtempSync(path.join(tmpdir(), "fencepost-e2e-"));
  chmodSync(folder, 0o755);
  const [port, operator] = [await freePort(), await freePort()];
  const ready = path.join(folder, "ready");
  // By a name: browsers use no passkeys at addresses.
  const url = `http://localhost:${port}`;
  const child = spawn(BINARY, [
    "dev", "--data-dir", path.join(folder, "data"), "--listen", `127.0.0.1:${port}`,
    "--metrics-listen", `127.0.0.1:${operator}`, "--ready-file", ready, "--trusted-proxies", "127.0.0.1",
    "--public-url", url,
  ], { stdio: ["ignore", "ignore", "inherit"], env: { ...process.env, FENCEPOST_LOG: "warn" } });
  await until("the server is ready", () => existsSync(ready) && readFileSync(ready, "utf8").includes("api_key"), 60);
  const { api_key: key } = JSON.parse(readFileSync(ready, "utf8"));
  const stop = async () => {
    const ended = new Promise((resolve) => child.once("exit", resolve));
    child.kill("SIGTERM");
    await ended;
    rmSync(folder, { recursive: true, force: true });
  };
  return { url, port, key, stop };
}

// The API with a key.
export function apiOf(url, key) {
  const call = async (method, route, body) => {
    const answer = await fetch(`${url}/v1${route}`, {
      method,
      headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await answer.text();
    if (!answer.ok) throw new Error(`${method} ${route}: ${answer.status} ${text}`);
    return text ? JSON.parse(text) : null;
  };
  return {
    get: (route) => call("GET", route),
    post: (route, body = {}) => call("POST", route, body),
    put: (route, body) => call("PUT", route, body),
    patch: (route, body) => call("PATCH", route, body),
    enqueue: async (job) => (await call("POST", "/jobs", job)).id,
    // Leases one job, and answers with what ends it.
    lease: async (worker, queue, waitSeconds = 10) => {
      const wanted = { worker_id: worker, queues: [queue], wait_seconds: waitSeconds };
      const { jobs: [job] } = await call("POST", "/workers/poll", wanted);
      if (!job) return null;
      const fence = { job_id: job.id, worker_id: worker, attempt: job.attempt, lease_id: job.lease_id };
      return {
        job,
        succeed: (result) => call("POST", "/workers/ack", { ...fence, status: "succeeded", result }),
        fail: (error) => call("POST", "/workers/ack", { ...fence, status: "failed", error }),
        log: (sequence, data, stream = "stdout") => call("POST", "/workers/logs", {
          worker_id: worker,
          chunks: [{ job_id: job.id, attempt: job.attempt, sequence, stream, data, timestamp_ms: Date.now() }],
        }),
      };
    },
  };
}

// Jobs come and go in another project for as long as the tests run.
export function load(api) {
  let isOn = true;
  const running = (async () => {
    for (let round = 0; isOn; round += 1) {
      const jobs = Array.from({ length: 100 }, (_, n) => ({ job_type: "load", queue: `load-${n % 3}`, payload: { n } }));
      await api.post("/jobs/batch", { jobs });
      for (let left = 100; left > 0 && isOn;) {
        const wanted = { worker_id: "load", queues: ["load-0", "load-1", "load-2"], capacity: 50, wait_seconds: 1 };
        const { jobs: leased } = await api.post("/workers/poll", wanted);
        const acks = leased.map((job) => ({
          job_id: job.id, worker_id: "load", attempt: job.attempt, lease_id: job.lease_id, status: "succeeded",
        }));
        if (acks.length) await api.post("/workers/ack/batch", { acks });
        left -= leased.length || 100;
      }
    }
  })();
  return async () => {
    isOn = false;
    await running;
  };
}

export async function startBrowser() {
  const executablePath = process.env.CHROMIUM || BROWSERS.find(existsSync);
  if (!executablePath) throw new Error("no Chromium: run `make setup-test`, or name one in CHROMIUM");
  return chromium.launch({ executablePath, args: FLAGS });
}

let windows = 0;

// A window of its own. Whatever a page complains about, or any script that it should not run, fails the test.
export async function openWindow(browser, options = {}) {
  // Each comes from an address of its own: what one address may try in a minute is limited.
  windows += 1;
  const extraHTTPHeaders = { "x-forwarded-for": `192.0.2.${windows}` };
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, extraHTTPHeaders, ...options });
  const page = await context.newPage();
  page.complaints = [];
  page.on("pageerror", (error) => page.complaints.push(`error: ${error.message}`));
  page.on("console", (message) => {
    if (message.type() === "error" && !/status of 4\d\d/.test(message.text())) page.complaints.push(message.text());
  });
  return page;
}

// Signs up in a window. The page is the one that shows the key; answers with it, and the project's path.
export async function signUp(page, url, email, project) {
  await page.goto(`${url}/console/signup`);
  await page.fill("[name=email]", email);
  await page.fill("[name=password]", PASSWORD);
  if (project) await page.fill("[name=project_name]", project);
  await page.click("main button");
  await page.locator("#the-key, .failure").first().waitFor();
  const refused = page.locator(".failure");
  if (await refused.count()) throw new Error(await refused.first().textContent());
  const key = await page.textContent("#the-key");
  const base = new URL(await page.getAttribute("nav.side a", "href"), url).href;
  return { key, base, api: apiOf(url, key) };
}

// Runs pasted shell lines.
export function shell(lines, folder) {
  const done = spawnSync("bash", ["-euo", "pipefail", "-c", lines], { cwd: folder, encoding: "utf8" });
  if (done.status !== 0) throw new Error(`${lines}\n${done.stdout}${done.stderr}`);
  return done.stdout;
}
