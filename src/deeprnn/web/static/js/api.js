// Talking to the server: JSON, files, streams of lines; a busy server is asked again, politely.

export class Failure extends Error {}

const wait = (ms, signal) => new Promise((done, fail) => {
  const timer = setTimeout(done, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); fail(signal.reason); }, { once: true });
});

async function ask(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server does not answer. Is deeprnn serve still running?");
    }
    if (answer.ok) return answer;
    if (answer.status === 503 && attempt < 4) {
      await wait(1000 * (Number(answer.headers.get("retry-after")) || 1) * (0.6 + Math.random()), options.signal);
      continue;
    }
    let message = `The server said ${answer.status}.`;
    try { message = (await answer.json()).error || message; } catch { /* not JSON: the status has to do */ }
    throw new Failure(message.charAt(0).toUpperCase() + message.slice(1));
  }
}

export async function get(path, signal) {
  return (await ask(path, { cache: "no-cache", signal })).json();
}

/** The header tells the server that the page asks: no other site's can send it. */
export async function post(path, body, signal) {
  return (await ask(path, { method: "POST", body: JSON.stringify(body), headers: { "x-deeprnn": "page" }, signal })).json();
}

export async function file(path, body) {
  return (await ask(path, { method: "POST", body: JSON.stringify(body) })).blob();
}

export async function upload(path, blob) {
  return (await ask(path, { method: "POST", body: blob })).json();
}

/** The documents of a streamed answer, as they come. */
export async function* lines(path, body, signal) {
  const answer = await ask(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += value || "";
    const parts = rest.split("\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part) continue;
      const item = JSON.parse(part);
      if (item.error) throw new Failure(item.error);
      yield item;
    }
    if (done) return;
  }
}
