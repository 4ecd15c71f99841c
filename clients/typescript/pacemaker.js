// Heartbeats while the event loop is blocked: a thread that stands in for the worker.

import { isMainThread, parentPort, Worker as Thread, workerData } from "node:worker_threads";

import { Client, credentialsOf } from "./client.js";

/** After this part of the time between two heartbeats without a word, the thread stands in. */
const PATIENCE = 1.25;
/** How often it looks, in the time between two heartbeats. */
const LOOKS_A_BEAT = 4;

/** The thread, as the worker sees it. */
export class Pacemaker {
  #thread;

  /** `onAnswer` gets what the server has said of a heartbeat, and when it was sent. */
  constructor(client, workerId, beatMs, onAnswer) {
    const fencepostPacemaker = { ...credentialsOf(client), workerId, beatMs };
    const options = { workerData: { fencepostPacemaker } };
    this.#thread = new Thread(new URL("./pacemaker.js", import.meta.url), options);
    // It must not keep the process alive.
    this.#thread.unref();
    this.#thread.on("message", onAnswer);
    this.#thread.on("error", (error) => {
      console.warn(`fencepost: no heartbeats while the event loop is blocked: ${error.message}`);
      this.#thread = undefined;
    });
  }

  /** The event loop runs, and so do these jobs. */
  note(state, active_jobs) {
    this.#thread?.postMessage({ state, active_jobs });
  }

  end() {
    return this.#thread?.terminate();
  }
}

/** What the thread does. */
function standIn({ url, key, workerId, beatMs }) {
  const client = new Client({ url, key });
  let last = { state: "running", active_jobs: [] };
  let heardAt = performance.now();
  let sentAt = -Infinity;
  let hasWarned = false;
  parentPort.on("message", (noted) => {
    last = noted;
    heardAt = performance.now();
    hasWarned = false;
  });
  setInterval(async () => {
    const now = performance.now();
    const silentMs = now - heardAt;
    const isDue = silentMs > beatMs * PATIENCE && now - sentAt > beatMs;
    if (!isDue || last.active_jobs.length === 0) return;
    sentAt = now;
    if (!hasWarned) {
      const seconds = (silentMs / 1000).toFixed(1);
      console.warn(`fencepost: the event loop is blocked for ${seconds} s: a thread sends the heartbeats`);
      hasWarned = true;
    }
    const begun = Date.now();
    const body = { worker_id: workerId, ...last };
    try {
      const limits = { timeoutMs: beatMs, retryMs: 0 };
      const answer = await client.request("POST", "/v1/workers/heartbeat", body, limits);
      parentPort.postMessage({ answer, begun });
    } catch (error) {
      console.warn(`fencepost: a heartbeat failed: ${error.message}`);
    }
  }, beatMs / LOOKS_A_BEAT);
}

// Other threads may import the library, too.
if (!isMainThread && workerData?.fencepostPacemaker) standIn(workerData.fencepostPacemaker);
