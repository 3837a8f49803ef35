// One chat completion as it comes.
const ALONE = "the server cannot be reached", LOST = "the connection to the server was lost";

// Yields the chunks of the answer. Throws Error with words for the reader; an AbortError where `signal` says so.
export async function* chunks(body, headers, signal) {
  const reply = await words(ALONE, fetch("v1/chat/completions", {method: "POST", headers, body: JSON.stringify(body), signal}));
  if (!reply.ok) throw new Error(await refusal(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await words(LOST, reader.read());
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue;
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
