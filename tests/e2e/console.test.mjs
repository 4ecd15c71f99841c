// The console as people use it, in a real browser against a real server under load.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import path from "node:path";
import { after, before, test } from "node:test";
import AxeBuilder from "@axe-core/playwright";
import { PASSWORD, apiOf, load, openWindow, shell, signUp, startBrowser, startServer, until } from "./stage.mjs";

const CORPUS = [
  "<script>alert(1)</script>",
  "\"><img src=x onerror=alert(1)>",
  "'><svg/onload=alert(1)>",
  "</textarea></pre></script><script>alert(1)</script>",
];
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];

let server, browser, stopLoad;
let people = 0;

before(async () => {
  server = await startServer();
  browser = await startBrowser();
  stopLoad = load(apiOf(server.url, server.key));
});

after(async () => {
  await stopLoad?.();
  await browser?.close();
  await server?.stop();
});

// A test with a window, a person, and their project.
const story = (name, run, options) => test(name, async () => {
  const page = await openWindow(browser, options);
  people += 1;
  const email = `ada-${people}@example.com`;
  const person = await signUp(page, server.url, email, "Acme");
  await run(page, { ...person, email });
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

// Runs pasted lines in a folder of their own, for as long as something else takes.
async function whileRuns(lines, isDone) {
  const folder = mkdtempSync(path.join(tmpdir(), "fencepost-snippet-"));
  const worker = spawn("bash", ["-c", lines], { cwd: folder, detached: true, stdio: "ignore" });
  const ended = new Promise((resolve) => worker.once("exit", resolve));
  try {
    await isDone();
  } finally {
    process.kill(-worker.pid, "SIGKILL");
    await ended;
    rmSync(folder, { recursive: true, force: true });
  }
}

const sees = (page, text) => page.getByText(text).first().waitFor();

story("a stranger signs up, pastes two snippets, and sees the first job done", async (page) => {
  await sees(page, "waiting for your first job");
  shell(await page.textContent("#enqueue"));
  await sees(page, "waits for a worker");
  await whileRuns(await page.textContent("#python"), async () => {
    await sees(page, "your first job has run");
    await page.click("#first a");
    await sees(page, "Hello, Ada!");
  });
});

for (const language of ["shell", "typescript"]) {
  story(`the ${language} worker that the first page shows works a job as well`, async (page, { api }) => {
    const id = await api.enqueue({ job_type: "greet", payload: { name: "Ada" } });
    await whileRuns(await page.textContent(`#${language}`), async () => {
      const job = await until("the job has ended", async () => {
        const job = await api.get(`/jobs/${id}`);
        return job.completed_at && job;
      }, 60);
      assert.equal(job.state, "succeeded");
    });
  });
}

story("a failure is found in the dead letters, retried slowly, and succeeds", async (page, { base, api }) => {
  const id = await api.enqueue({ job_type: "email.send", queue: "mail", max_attempts: 1, payload: { to: "ada" } });
  await page.goto(`${base}/jobs/${id}`);
  await sees(page, "no live worker polls");
  const first = await api.lease("mailer", "mail");
  await sees(page, "processing");
  await first.log(1, "connecting\n");
  await sees(page, "connecting");
  await first.fail({ type: "Refused", message: "connection 17 refused", stack_trace: "at line 1" });
  await sees(page, "retry it manually");
  await page.click("nav.side >> text=Dead letters");
  await sees(page, "connection 17 refused");
  await page.click("text=Retry these…");
  await sees(page, "Retry 1 dead letter?");
  await page.fill("[name=rate_per_second]", "5");
  await page.click("text=Retry them");
  await sees(page, "The operation has started: it retries the dead letters.");
  await page.locator(".chip", { hasText: "succeeded" }).waitFor();
  const second = await api.lease("mailer", "mail");
  assert.equal(second.job.id, id);
  assert.equal(second.job.attempt, 2);
  await second.succeed({ sent: true });
  await page.goto(`${base}/jobs/${id}`);
  await page.locator("h1 .chip", { hasText: "succeeded" }).waitFor();
  assert.equal(await page.locator("table.timeline tbody tr:not(.detail)").count(), 2);
});

story("a paused queue delivers nothing until it is resumed", async (page, { base, api }) => {
  await api.enqueue({ job_type: "t", queue: "slow" });
  await page.goto(`${base}/queues`);
  await page.click("[aria-label='Pause slow']");
  await sees(page, "it accepts jobs, but none is claimed");
  assert.equal(await api.lease("w", "slow", 0), null);
  await page.click("text=Overview");
  await sees(page, "paused while jobs wait");
  await page.click("main >> text=slow");
  await page.click("button >> text=Resume");
  await sees(page, "claimed again");
  assert.ok(await api.lease("w", "slow"));
  // Limits: a mistake is named where it is made, and nothing that was typed is lost.
  await page.click("text=Limits and defaults");
  await page.fill("[name='rate_limit.count']", "5");
  await page.click("button >> text=Save");
  await sees(page, "Rate limit: window in seconds is missing");
  assert.equal(await page.getAttribute("[name='rate_limit.per_seconds']", "aria-invalid"), "true");
  const reported = await page.locator("#problem .failure").boundingBox();
  assert.ok(reported.y >= 0 && reported.y < 900, `what is wrong is in sight, not at ${reported.y}`);
  assert.equal(await page.inputValue("[name='rate_limit.count']"), "5");
  await page.fill("[name='rate_limit.per_seconds']", "60");
  await page.selectOption("[name='groups.order']", "strict");
  await page.selectOption("[name='groups.on_dead']", "skip");
  await page.click("button >> text=Save");
  await sees(page, "settings are saved");
  const queue = await api.get("/queues/slow");
  assert.deepEqual(queue.rate_limit, { count: 5, per_seconds: 60 });
  const rules = { order: "strict", on_dead: "skip", max_running: null, rates: [], fair: false };
  assert.deepEqual(queue.groups, rules);
});

story("a schedule is previewed in its zone, made, run and paused", async (page, { base, api }) => {
  await page.goto(`${base}/recurring/new`);
  await page.fill("[name=cron_expression]", "nonsense");
  await sees(page, "Please correct:");
  assert.match(await page.textContent("#preview"), /Cron expression/);
  assert.equal(await page.getAttribute("[name=cron_expression]", "aria-invalid"), "true");
  await page.fill("[name=cron_expression]", "30 2 * * *");
  await page.fill("[name=timezone]", "Europe/Berlin");
  await page.locator("#preview li").nth(4).waitFor();
  assert.match(await page.textContent("#preview"), /02:30:00 \+0[12]:00/);
  assert.equal(await page.getAttribute("[name=cron_expression]", "aria-invalid"), null);
  await page.fill("[name=job_type]", "report.daily");
  await page.click("button >> text=Create schedule");
  await sees(page, "The schedule is created.");
  await page.click("text=Run now");
  await sees(page, "The job is enqueued.");
  await page.click("nav.side >> text=Recurring");
  await page.click("main table a");
  await sees(page, "manual");
  await page.click("button >> text=Pause");
  await sees(page, "The schedule is paused.");
  assert.equal((await api.get("/recurring")).recurring[0].enabled, false);
});

story("all jobs that match are cancelled, counted first", async (page, { base, api }) => {
  const jobs = Array.from({ length: 120 }, (_, n) => ({ job_type: "t", queue: "bulk", tags: { customer: String(n % 2) } }));
  await api.post("/jobs/batch", { jobs });
  await page.goto(`${base}/jobs`);
  await page.click("nav.tabs >> text=Pending");
  await page.fill("[name=q]", "tag:customer=1 queue:bulk");
  await page.click("button >> text=Search");
  await page.waitForURL(/customer%3D1/);
  await page.click("text=Cancel…");
  await sees(page, "Cancel 60 jobs?");
  await page.click("text=Cancel them");
  await page.locator("h1 .chip", { hasText: "succeeded" }).waitFor();
  await sees(page, "100 %");
  assert.equal((await api.get("/queues/bulk")).counts.cancelled, 60);
});

story("a stuck job is found among thousands by its age, its error or the end of its id", async (page, { base, api }) => {
  const stuck = await api.enqueue({ job_type: "find.me", queue: "hay", tags: { customer: "7" } });
  for (let round = 0; round < 24; round += 1) {
    await api.post("/jobs/batch", { jobs: Array.from({ length: 500 }, () => ({ job_type: "hay", queue: "hay", delay_seconds: 600 })) });
  }
  await page.goto(`${base}/jobs`);
  assert.match(await page.textContent("nav.tabs"), /Scheduled\s*1\D?2/i);
  const find = async (line) => {
    await page.fill("[name=q]", line);
    await page.keyboard.press("Enter");
    await page.locator(`tr[id=${stuck}]`).waitFor();
    assert.equal(await page.locator("tbody tr").count(), 1, line);
  };
  await find("state:pending queue:hay");
  await find("tag:customer=7 age:<1h");
  await find(stuck.slice(-8));
  await page.fill("[name=q]", "colour:red");
  await page.keyboard.press("Enter");
  await sees(page, "`colour:` is not a condition");
  assert.equal(await page.inputValue("[name=q]"), "colour:red");
  await page.fill("[name=q]", "");
  await page.locator("[name=q]").pressSequentially("type:hay que");
  assert.deepEqual(await page.locator("#suggested option").evaluateAll((all) => all.map((it) => it.value)), ["type:hay queue:hay"]);
  await page.fill("[name=q]", stuck);
  await page.keyboard.press("Enter");
  await page.waitForURL(`${base}/jobs/${stuck}`);
});

story("chosen jobs are cancelled, and only those", async (page, { base, api }) => {
  await api.post("/jobs/batch", { jobs: Array.from({ length: 6 }, () => ({ job_type: "t", queue: "few" })) });
  await page.goto(`${base}/jobs?queue=few`);
  assert.equal(await page.inputValue("[name=q]"), "queue:few");
  assert.equal(await page.isVisible("[data-chosen]"), false);
  const boxes = page.locator("input[name=ids]");
  await boxes.nth(1).click();
  await boxes.nth(3).click({ modifiers: ["Shift"] });
  await sees(page, "3 chosen:");
  await page.click("[data-chosen] >> text=Cancel…");
  await sees(page, "Cancel 3 jobs?");
  await page.click("text=Cancel them");
  await page.locator("h1 .chip", { hasText: "succeeded" }).waitFor();
  assert.equal((await api.get("/queues/few")).counts.cancelled, 3);
  await page.goto(`${base}/jobs?queue=few`);
  const states = await page.locator("tbody tr .chip").allTextContents();
  assert.deepEqual(states.map((it) => it.trim()), ["pending", "cancelled", "cancelled", "cancelled", "pending", "pending"]);
});

story("rows under the pointer stay where they are", async (page, { base, api }) => {
  const first = await api.enqueue({ job_type: "first", queue: "steady" });
  await page.goto(`${base}/jobs?queue=steady`);
  const row = page.locator(`tr[id=${first}]`);
  await row.hover();
  const before = await row.boundingBox();
  await api.post("/jobs/batch", { jobs: Array.from({ length: 3 }, () => ({ job_type: "later", queue: "steady" })) });
  await api.post(`/jobs/${first}/cancel`);
  await sees(page, "3 new jobs");
  await row.locator(".chip", { hasText: "cancelled" }).waitFor();
  assert.equal(await page.locator("tbody tr").count(), 1);
  assert.ok(Math.abs((await row.boundingBox()).y - before.y) < 40, "it stays near the pointer");
  await page.click("text=3 new jobs");
  await page.locator("tbody tr").nth(3).waitFor();
  assert.equal(await page.isVisible("[data-more]"), false);
});

story("a job is made by hand, and any page is a few keys away", async (page, { base, api }) => {
  await page.goto(`${base}/jobs`);
  await page.click("text=New job");
  await page.fill("[name=job_type]", "by.hand");
  await page.fill("[name=payload]", "{\"customer\": }");
  await page.click("button >> text=Enqueue");
  await sees(page, "must be JSON");
  await page.fill("[name=payload]", "{\"customer\": \"O'Neil\"}");
  await page.click("button >> text=Enqueue");
  await page.locator("h1", { hasText: "by.hand" }).waitFor();
  await page.click("text=As curl");
  await sees(page, "O'\\''Neil");
  const id = new URL(page.url()).pathname.split("/").at(-1);
  assert.deepEqual((await api.get(`/jobs/${id}`)).payload, { customer: "O'Neil" });
  await page.keyboard.press("g");
  await page.keyboard.press("d");
  await page.waitForURL(`${base}/dead-letters`);
  await page.keyboard.press("Control+k");
  await page.locator("#palette-line").pressSequentially("audit");
  await page.keyboard.press("Enter");
  await page.waitForURL(`${base}/audit-log`);
  await page.keyboard.press("Control+k");
  await page.locator("#palette-line").pressSequentially("type:by.hand");
  await page.keyboard.press("Enter");
  await page.locator(`tr[id=${id}]`).waitFor();
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForURL(`${base}/jobs/${id}`);
  await page.keyboard.press("g");
  await page.keyboard.press("j");
  await page.waitForURL(`${base}/jobs`);
  await page.keyboard.press("/");
  assert.equal(await page.evaluate(() => document.activeElement.name), "q");
  const missing = await page.goto(`${base}/jobs/job_01m7w3ha3aextt8pkwwdmxsmqw`);
  assert.equal(missing.status(), 404);
  await sees(page, "Dead letters", "the menu stays");
});

story("the failed jobs of a workflow are retried together, and charts show a longer time", async (page, { base, api }) => {
  const jobs = ["a", "b", "c"].map((key) => ({ key, job_type: "step", queue: "flow", max_attempts: 1 }));
  const { id } = await api.post("/workflows", { name: "nightly", jobs });
  for (let done = 0; done < 2; done += 1) await (await api.lease("w", "flow")).fail({ type: "Refused", message: "refused" });
  await page.goto(`${base}/workflows/${id}`);
  await page.click("text=Retry 2 failed jobs");
  await sees(page, "Retry 2 jobs?");
  await page.click("text=Retry them");
  await page.locator("h1 .chip", { hasText: "succeeded" }).waitFor();
  assert.equal((await api.get("/queues/flow")).counts.dead_letter, 0);
  await page.goto(`${base}/queues/flow`);
  await page.click("nav.periods >> text=7d");
  await sees(page, "Jobs per hour, in the last 7 days");
  assert.equal(await page.locator(".plot canvas").count(), 2);
});

story("pages follow what happens, stop when they are asked to, and outlive a failure", async (page, { base, api }) => {
  await page.goto(`${base}/jobs`);
  await api.enqueue({ job_type: "first.live", queue: "live" });
  await sees(page, "first.live");
  await page.click("[data-live-switch]");
  await sees(page, "Paused");
  const asked = [];
  page.on("request", (request) => asked.push(request.url()));
  await api.enqueue({ job_type: "second.live", queue: "live" });
  // Longer than between two looks that nothing has asked for: there is no event for what does not happen.
  await page.waitForTimeout(7000);
  assert.deepEqual(asked, []);
  assert.equal(await page.getByText("second.live").count(), 0);
  await page.goto(`${base}/queues`);
  await sees(page, "Paused");
  await page.goto(`${base}/jobs`);
  // A node that is going away answers one look with a failure.
  let refused = 0;
  await page.route("**/jobs", async (route) => {
    refused += 1;
    if (refused > 1) return route.continue();
    return route.fulfill({ status: 503, contentType: "text/html", body: "<p>one moment</p>" });
  });
  await page.click("[data-live-switch]");
  await page.locator("#lost", { hasText: "(503). Trying again" }).waitFor();
  await page.locator("[data-refresh][data-old]").waitFor();
  await sees(page, "Not up to date");
  await sees(page, "second.live");
  await page.locator("#lost:empty").waitFor({ state: "attached" });
  await sees(page, "Live updates");
  assert.equal(await page.locator("[data-old]").count(), 0);
  await api.enqueue({ job_type: "third.live", queue: "live" });
  await sees(page, "third.live");
  page.complaints = page.complaints.filter((it) => !it.includes("503"));
});

story("a button that is pressed twice does its work once", async (page, { base, api }) => {
  const id = await api.enqueue({ job_type: "twice", queue: "twice" });
  await page.goto(`${base}/jobs/${id}`);
  const once = () => page.locator("div.buttons form[action$='/replay'] [name=once]").inputValue();
  const before = await once();
  const facts = page.locator(".facts dd", { hasText: "5" });
  await api.patch(`/jobs/${id}`, { priority: 5 });
  await facts.first().waitFor();
  assert.equal(await once(), before, "a form is the same one when the page has looked again");
  const twice = await page.evaluate(async () => {
    const form = [...document.querySelectorAll("form")].find((it) => it.action.endsWith("/replay"));
    const send = () => fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
    return (await Promise.all([send(), send()])).map((it) => it.url);
  });
  assert.equal((await api.get("/jobs?job_type=twice")).jobs.length, 2, twice.join(" "));
});

story("a key is made, shown once, rotated and revoked, and a mistake is reported", async (page, { base }) => {
  page.on("dialog", (dialog) => dialog.accept());
  await page.goto(`${base}/keys`);
  await page.click("summary >> text=Create a key");
  await page.fill("main form [name=name]", "billing");
  await page.check("[name=preset][value=own]");
  await page.click("summary >> text=Scopes of your choice");
  for (const box of await page.locator("[name=scopes]").all()) await box.uncheck();
  await page.click("button >> text=Create key");
  await page.locator("#problem .failure", { hasText: "scopes" }).waitFor();
  await page.check("[name=scopes][value=read]");
  await page.click("button >> text=Create key");
  const secret = await page.locator("#the-key").textContent();
  const made = apiOf(server.url, secret);
  await made.get("/jobs");
  await assert.rejects(made.post("/jobs", { job_type: "t" }), /forbidden/);
  assert.equal(await page.locator("#problem .failure").count(), 0);
  await page.click("[aria-label='Rotate billing']");
  await until("there is another key", async () => (await page.locator("#the-key").textContent()) !== secret);
  const next = await page.locator("#the-key").textContent();
  await apiOf(server.url, next).get("/jobs");
  await page.goto(`${base}/keys`);
  assert.equal(await page.locator("#the-key").count(), 0);
  const live = () => page.locator("[aria-label='Revoke billing']").count();
  assert.equal(await live(), 2);
  for (const left of [1, 0]) {
    await page.locator("[aria-label='Revoke billing']").first().click();
    await sees(page, "The key is revoked");
    await page.goto(`${base}/keys`);
    assert.equal(await live(), left);
  }
  await assert.rejects(made.get("/jobs"), /401/);
});

story("another project is one menu away", async (page, { base }) => {
  await page.goto(`${server.url}/console/projects`);
  await page.fill("[name=name]", "Beta");
  await page.click("text=Create project");
  await page.waitForURL((url) => url.pathname.includes("/p/beta"));
  const menu = page.locator("details.switch");
  await menu.locator("summary").click();
  await menu.getByRole("link", { name: "Acme" }).waitFor();
  await page.keyboard.press("Escape");
  assert.equal(await menu.getAttribute("open"), null);
  await menu.locator("summary").click();
  const axe = await new AxeBuilder({ page }).withTags(RULES).include("header.top").analyze();
  assert.deepEqual(axe.violations, []);
  await menu.getByRole("link", { name: "Acme" }).click();
  await page.waitForURL((url) => url.pathname === new URL(base, server.url).pathname);
});

story("a terminal is logged in by a code", async (page) => {
  const begin = await fetch(`${server.url}/v1/auth/device`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ name: "cli@lovelace" }),
  });
  const { device_code, user_code, verification_uri_complete } = await begin.json();
  const collect = async () => (await fetch(`${server.url}/v1/auth/device/key`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ device_code }),
  })).json();
  assert.equal((await collect()).api_key, null);
  await page.goto(`${server.url}/console/device`);
  await page.fill("[name=code]", "BCDF-GHJK");
  await page.click("text=Continue");
  await sees(page, "This code is wrong");
  page.complaints.length = 0; // The browser says that the answer was a 400.
  await page.fill("[name=code]", user_code.toLowerCase());
  await page.click("text=Continue");
  await sees(page, "cli@lovelace");
  const axe = await new AxeBuilder({ page }).withTags(RULES).analyze();
  assert.deepEqual(axe.violations, []);
  await page.goto(verification_uri_complete);
  await sees(page, "Compare the code");
  await page.click("text=Read all but payloads");
  await page.click("button >> text=Approve");
  await sees(page, "The terminal logs in within seconds");
  const { api_key } = await collect();
  assert.deepEqual(api_key.key.scopes, ["read"]);
});

story("a viewer may look and not touch", async (page, { base, api }) => {
  const id = await api.enqueue({ job_type: "t", queue: "q" });
  await page.goto(`${base}/members`);
  await page.fill("[name=email]", "eve@example.com");
  await page.selectOption("main form.card [name=role]", "viewer");
  await page.click("text=Invite");
  const link = await page.textContent("#the-link");
  const secret = new URL(link).hash.slice("#token=".length);
  assert.match(secret, /^fp_mail_\w{43}$/);
  const eve = await openWindow(browser);
  const requested = [];
  eve.on("request", (it) => requested.push(it.url()));
  // As from a web mail: another site has the link.
  const mail = createServer((_, answer) => answer.setHeader("content-type", "text/html").end(`<a href="${link}">Open</a>`));
  await new Promise((resolve) => { mail.listen(0, "127.0.0.1", resolve); });
  try {
    await eve.goto(`http://127.0.0.1:${mail.address().port}/`);
    await eve.click("text=Open");
    await eve.locator("h1", { hasText: "You are invited to Acme" }).waitFor();
  } finally {
    mail.close();
  }
  assert.ok(!eve.url().includes(secret));
  await eve.click("main >> text=Sign up");
  await eve.fill("[name=email]", "eve@example.com");
  await eve.fill("[name=password]", PASSWORD);
  await eve.click("main button");
  await eve.locator("nav.side").waitFor();
  assert.ok(requested.every((it) => !it.includes(secret)), "no request line has the secret");
  await eve.goto(`${base}/jobs/${id}`);
  await eve.locator("h1").waitFor();
  assert.equal(await eve.locator("main form[method=post], main button:not([data-copy])").count(), 0);
  const status = await eve.evaluate(async (action) => {
    const form = new URLSearchParams({ queue: "q", back: "/console" });
    return (await fetch(action, { method: "POST", body: form })).status;
  }, `${base}/do/queues_pause`);
  assert.equal(status, 403);
  assert.equal((await api.get("/queues/q")).paused_at, null);
  await eve.context().close();
});

story("a passkey is added, logs in without a password, and is asked for after it", async (page, { email }) => {
  const session = await page.context().newCDPSession(page);
  await session.send("WebAuthn.enable");
  await session.send("WebAuthn.addVirtualAuthenticator", {
    options: {
      protocol: "ctap2", transport: "internal", hasResidentKey: true, hasUserVerification: true,
      isUserVerified: true, automaticPresenceSimulation: true,
    },
  });
  const account = `${server.url}/console/account`;
  await page.goto(account);
  await page.click("text=Add a passkey");
  await page.fill("[name=name]", "laptop");
  await check(page, "the page that creates a passkey");
  await page.click("text=Create the passkey");
  await page.locator("#codes").waitFor();
  assert.equal((await page.textContent("#codes")).trim().split("\n").length, 10);
  await page.click("text=I have stored them");
  await page.locator("th", { hasText: "laptop" }).waitFor();
  // The same device has one of this account already.
  await page.click("text=Add a passkey");
  await page.fill("[name=name]", "again");
  await page.click("text=Create the passkey");
  await page.locator("#problem", { hasText: "has a passkey of your account already" }).waitFor();

  const logOut = async () => {
    await page.goto(account);
    await page.click("text=Log out");
    await page.locator("h1", { hasText: "Log in" }).waitFor();
  };
  await logOut();
  await check(page, "the login with a passkey");
  await page.click("text=Use a passkey");
  await page.locator("nav.side").waitFor();
  await logOut();
  await page.fill("[name=email]", email);
  await page.fill("[name=password]", PASSWORD);
  await page.click("main button.primary");
  await page.locator("h1", { hasText: "One more step" }).waitFor();
  await page.click("text=Use a passkey");
  await page.locator("nav.side").waitFor();

  await page.goto(`${server.url}/console/step-up?next=/console/account`);
  await page.click("text=Use a passkey");
  await page.locator("h1", { hasText: "Account" }).waitFor();
  await page.click("text=Remove");
  await page.locator(".done", { hasText: "cannot log in any more" }).waitFor();
});

story("another site cannot press a button", async (page, { base, api }) => {
  await api.enqueue({ job_type: "t", queue: "q" });
  const trap = `<form method="post" action="${base}/do/queues_pause"><input name="queue" value="q"><button>Win</button></form>`;
  const site = createServer((_, answer) => answer.setHeader("content-type", "text/html").end(trap));
  await new Promise((resolve) => { site.listen(0, "127.0.0.1", resolve); });
  try {
    await page.goto(`http://127.0.0.1:${site.address().port}/`);
    const [answer] = await Promise.all([page.waitForResponse(/queues_pause/), page.click("text=Win")]);
    assert.equal((await answer.request().allHeaders())["sec-fetch-site"], "cross-site");
    assert.equal(answer.status(), 403);
  } finally {
    site.close();
  }
  assert.equal((await api.get("/queues/q")).paused_at, null);
  await page.goto(`${base}/queues/q`);
  await page.locator("h1", { hasText: "Queue q" }).waitFor();
});

story("a button is about the same thing after the page has looked again", async (page, { base, api }) => {
  const dead_letter = async (message) => {
    const id = await api.enqueue({ job_type: "t", queue: "q", max_attempts: 1 });
    await (await api.lease("w", "q")).fail({ type: "Refused", message });
    return id;
  };
  const first = await dead_letter("alpha refused");
  await page.goto(`${base}/dead-letters/list`);
  await page.focus(`[aria-label='Delete ${first}']`);
  await dead_letter("omega refused");
  await page.locator("tbody tr").nth(1).waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), `Delete ${first}`);
  page.once("dialog", (dialog) => {
    assert.match(dialog.message(), new RegExp(first));
    dialog.accept();
  });
  await page.keyboard.press("Enter");
  await sees(page, "It is deleted.");
  assert.equal(await page.getByText("alpha refused").count(), 0);
  assert.equal(await page.getByText("omega refused").count(), 1);
});

story("buttons stay what they are when others come before them", async (page, { base, api }) => {
  const retry = { strategy: "constant", initial_seconds: 600, jitter_seconds: 0 };
  const id = await api.enqueue({ job_type: "t", queue: "q", retry });
  const leased = await api.lease("w", "q");
  await page.goto(`${base}/jobs/${id}`);
  await sees(page, "processing");
  await leased.fail({ type: "Refused", message: "refused" });
  await page.locator("button", { hasText: "Run now" }).waitFor();
  await page.click("main >> button >> text=Cancel");
  await sees(page, "The job is cancelled");
  assert.equal(new URL(page.url()).pathname, new URL(`${base}/jobs/${id}`).pathname);
  await page.locator("h1 .chip", { hasText: "cancelled" }).waitFor();
});

story("a form with unsent changes is not overwritten", async (page, { base, api }) => {
  await api.enqueue({ job_type: "t", queue: "q" });
  await api.patch("/queues/q", { max_concurrency: 3 });
  await page.goto(`${base}/queues/q`);
  await page.click("text=Limits and defaults");
  await page.fill("[name=max_concurrency]", "7");
  await page.locator("h1").click();
  await api.patch("/queues/q", { max_concurrency: 9, brake_after: 20 });
  await sees(page, "Waits for your form");
  // Nor does it overwrite what another has saved since.
  await page.click("button >> text=Save");
  await sees(page, "was changed meanwhile");
  assert.equal((await api.get("/queues/q")).max_concurrency, 9);
  await page.goto(`${base}/queues/q`);
  await page.click("text=Limits and defaults");
  await page.fill("[name=max_concurrency]", "7");
  await page.click("button >> text=Save");
  await sees(page, "settings are saved");
  const queue = await api.get("/queues/q");
  assert.deepEqual([queue.max_concurrency, queue.brake_after], [7, 20]);
  await page.click("text=Limits and defaults");
  await page.click("button >> text=Save");
  await sees(page, "Nothing was changed.");
});

story("logs are shown in the order of their times, to the last line, and once", async (page, { base, api }) => {
  const id = await api.enqueue({ job_type: "t", queue: "q" });
  const leased = await api.lease("w", "q");
  await leased.log(1, "line 1\n");
  await leased.log(1, "line 2\n", "stderr");
  await page.goto(`${base}/jobs/${id}`);
  await page.locator("#logs .text", { hasText: "line 2" }).waitFor();
  await leased.log(2, "line 3\n");
  await leased.log(2, "line 4\n", "stderr");
  await page.locator("#logs .text", { hasText: "line 4" }).waitFor();
  await page.locator("[data-live-switch]").click();
  await leased.log(3, "line 5\n");
  await page.locator("[data-live-switch]").click();
  await leased.log(3, "line 6\n", "stderr");
  await leased.succeed({ n: 1 });
  await page.locator("#logs .text", { hasText: "line 6" }).waitFor();
  await page.locator("h1 .chip", { hasText: "succeeded" }).waitFor();
  const lines = [1, 2, 3, 4, 5, 6].map((it) => `line ${it}`);
  const shown = async () => (await page.locator("#logs .text").allTextContents()).map((it) => it.trim());
  assert.deepEqual((await shown()).toSorted(), lines);
  await page.reload();
  assert.deepEqual(await shown(), lines);
  // The page of an ended job continues when the job is retried.
  const dead = await api.enqueue({ job_type: "t", queue: "q", max_attempts: 1 });
  const first = await api.lease("w", "q");
  await first.log(1, "line 1\n");
  await first.log(2, "line 2\n");
  await first.fail({ type: "Refused", message: "refused" });
  await page.goto(`${base}/jobs/${dead}`);
  await page.locator("h1 .chip", { hasText: "dead letter" }).waitFor();
  await api.post(`/jobs/${dead}/retry`);
  const second = await api.lease("w", "q");
  await page.locator("h1 .chip", { hasText: "processing" }).waitFor();
  await second.log(1, "line 3\n");
  await page.locator("#logs .text", { hasText: "line 3" }).waitFor();
  assert.deepEqual(await shown(), lines.slice(0, 3));
});

story("what others wrote stays text", async (page, { base, api }) => {
  let hasRun = false;
  page.on("dialog", (dialog) => { hasRun = true; dialog.dismiss(); });
  const paths = ["", "/jobs", "/queues", "/dead-letters", "/dead-letters/list", "/workers", "/workflows", "/recurring", "/keys", "/audit-log"];
  for (const text of CORPUS) {
    const id = await api.enqueue({ job_type: text, queue: text, payload: { [text]: text }, tags: { t: text }, max_attempts: 1 });
    const leased = await api.lease(text, text);
    await leased.log(1, text);
    await leased.fail({ type: text, message: text, stack_trace: text });
    await page.goto(`${base}/keys`);
    await page.click("summary >> text=Create a key");
    await page.fill("main form [name=name]", text);
    await page.click("button >> text=Create key");
    await page.locator("#the-key").waitFor();
    const { id: workflow } = await api.post("/workflows", { name: text, jobs: [{ key: text, job_type: text }] });
    await api.post("/recurring", { job_type: text, cron_expression: "@daily", payload: text });
    paths.push(`/jobs/${id}`, `/workflows/${workflow}`, `/queues/${encodeURIComponent(text)}`);
  }
  for (const route of paths) {
    await page.goto(base + route);
    await page.locator("h1").waitFor();
    assert.equal(await page.locator("main script, main img[src=x], main svg[onload]").count(), 0, route);
  }
  // Logs that arrive while the page is open.
  const id = await api.enqueue({ job_type: "logs", queue: "logs" });
  await page.goto(`${base}/jobs/${id}`);
  const leased = await api.lease("w", "logs");
  await leased.log(1, CORPUS[1]);
  await page.locator("#logs .text", { hasText: "onerror" }).waitFor();
  assert.equal(hasRun, false);
});

story("the keyboard is enough, and so is no script", async (page, { base, api, email }) => {
  await api.enqueue({ job_type: "t", queue: "q" });
  await page.goto(`${base}/queues`);
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
  await page.keyboard.press("Enter");
  for (let presses = 0; (await page.evaluate(() => document.activeElement.textContent)) !== "Pause"; presses += 1) {
    assert.ok(presses < 20, "the button is reached");
    await page.keyboard.press("Tab");
  }
  await page.keyboard.press("Enter");
  await sees(page, "none is claimed");
  await page.waitForFunction(() => document.activeElement.matches(".done"));
  const plain = await openWindow(browser, { javaScriptEnabled: false });
  await plain.goto(`${base}/queues/q`);
  await plain.fill("[name=email]", email);
  await plain.fill("[name=password]", PASSWORD);
  await plain.click("main button");
  await sees(plain, "paused while jobs wait");
  assert.equal(await plain.locator("[data-theme-switch]").isVisible(), false, "what needs a script is not there");
  await plain.click("button >> text=Resume");
  await sees(plain, "claimed again");
  await plain.context().close();
});

// Accessibility problems, and content that does not fit into the window.
async function check(page, place) {
  const { violations } = await new AxeBuilder({ page }).withTags(RULES).analyze();
  const reported = violations.map((it) => `${it.id}: ${it.nodes[0].html} ${it.nodes[0].failureSummary}`);
  assert.deepEqual(reported, [], place);
  const excess = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert.ok(excess <= 0, `${place} is ${excess} px wider than the window`);
}

// By day each theme once, and the narrowest window; at night all. Each takes more than a minute.
const BY_DAY = [["dark", 1280], ["light", 360]];
const AT_NIGHT = [["light", 1280], ["dark", 768]];
const appearances = process.env.FENCEPOST_E2E_ALL ? [...BY_DAY, ...AT_NIGHT] : BY_DAY;

for (const [colorScheme, width] of appearances) {
  story(`every page can be read by everybody, ${colorScheme}, ${width} wide`, async (page, { base, api }) => {
    const id = await api.enqueue({ job_type: "email.send", queue: "mail", max_attempts: 1, payload: { to: "ada" } });
    await (await api.lease("mailer", "mail")).fail({ type: "Refused", message: "refused", stack_trace: "at line 1" });
    await api.enqueue({ job_type: "later", queue: "later", delay_seconds: 600 });
    const { id: workflow } = await api.post("/workflows", { name: "nightly", jobs: [{ key: "a", job_type: "t" }, { key: "b", job_type: "t", depends_on: ["a"] }] });
    await api.put("/recurring/nightly", { job_type: "t", cron_expression: "0 3 * * *", timezone: "Europe/Berlin" });
    const { operation } = await api.post("/dead-letters/retry", { filter: { queue: "none" } });
    const paths = [
      "", "/start", "/jobs", "/jobs/bulk/jobs_bulk_cancel", `/jobs/${id}`, "/queues", "/queues/mail", "/dead-letters",
      "/dead-letters/list", "/dead-letters/bulk/dead_letters_bulk_retry", "/dead-letters/bulk/dead_letters_purge", "/recurring", "/recurring/new",
      "/recurring/s/nightly", "/recurring/s/nightly/edit", "/workers", "/workflows", `/workflows/${workflow}`, "/operations",
      `/operations/${operation.id}`, "/keys", "/members", "/limits", "/audit-log", "/settings",
    ].map((it) => base + it);
    for (const route of ["projects", "account", "login", "signup", "reset", "verify", "invitation", "nothing"]) {
      paths.push(`${server.url}/console/${route}`);
    }
    await check(page, "the page that shows the key");
    for (const place of paths) {
      await page.goto(place);
      for (const summary of await page.locator("main summary").all()) await summary.click();
      await check(page, place);
    }
  }, { colorScheme, viewport: { width, height: 900 }, reducedMotion: "reduce" });
}
