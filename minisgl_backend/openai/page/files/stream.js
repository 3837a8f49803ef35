// One answer as it comes.
const ALONE = "the server cannot be reached", LOST = "the connection to the server was lost";
const CUT_OFF = "the answer was cut off: its stream ended before it was whole";

// Yields the chunks of the answer to `body`, sent to `route`. Throws Error with words for the reader, and with `status`
// where the server refused; an AbortError where `signal` says so.
export async function* chunks(route, body, headers, signal) {
  const reply = await words(ALONE, fetch(route, {method: "POST", headers, body: JSON.stringify(body), signal}));
  if (!reply.ok) throw Object.assign(new Error(await refusal(reply)), {status: reply.status});
  if (!/^text\/event-stream/.test(reply.headers.get("content-type")))
    throw new Error("what came is no answer of this server; perhaps a proxy's page, where one has to sign in");
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await words(LOST, reader.read());
    if (done) throw new Error(CUT_OFF);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: {")) continue;  // a comment that keeps the connection open
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// Why a request was refused: the server's words, or its status where a proxy answered.
async function refusal(reply) {
  try { return (await reply.json()).error.message; } catch { return `the server answers ${reply.status} ${reply.statusText}`; }
}

async function words(failure, promise) {
  try { return await promise; } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(failure);
  }
}
