// A worker with the calls of Orch8's client: pollTask, completeTask, failTask. Runs tasks until a
// poll returns none. Requires Node 18 or newer, and no packages:
//   ORCH8_URL=http://127.0.0.1:7070/orch8 ORCH8_KEY=fp_live_… node orch8.mjs

class Client {
  constructor({ baseUrl, apiKey }) {
    Object.assign(this, { baseUrl, apiKey });
  }

  async #post(path, body) {
    const response = await fetch(`${this.baseUrl}/workers/tasks/${path}`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-api-key": this.apiKey },
      body: JSON.stringify(body),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${response.status}: ${text}`);
    return text ? JSON.parse(text) : null;
  }

  pollTask = (wanted) => this.#post("poll", wanted);
  completeTask = (id, done) => this.#post(`${id}/complete`, done);
  failTask = (id, failure) => this.#post(`${id}/fail`, failure);
}

function processImage({ image_url, width }) {
  if (!image_url) throw Object.assign(new Error("no image_url"), { transient: false });
  if (width > 10_000) throw Object.assign(new Error("out of memory"), { transient: true });
  return { resized_url: `${image_url}?w=${width}` };
}

const client = new Client({ baseUrl: process.env.ORCH8_URL, apiKey: process.env.ORCH8_KEY });
const wanted = { handler_names: ["process_image"], worker_id: "img-worker-1" };
for (let task; (task = await client.pollTask(wanted)); ) {
  try {
    await client.completeTask(task.id, { output: processImage(task.params) });
    console.log("completed", task.metadata.attempt);
  } catch (error) {
    await client.failTask(task.id, { error: error.message, retryable: error.transient ?? true });
    console.log("failed", task.metadata.attempt);
  }
  if (process.env.ORCH8_TASKS && --process.env.ORCH8_TASKS <= 0) break;
}
