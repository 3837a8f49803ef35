// Vercel's AI SDK with its default model, over /v1/responses: two turns, each with a tool loop, whole and streamed.
// Later requests name what was answered by its id. Argument: the endpoint's URL.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const asked = [];
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => {
    asked.push([a, b]);
    return a + b;
  },
});

const messages = [{ role: "user", content: "What is 17 + 25?" }];
let known = 0; // tokens of the conversation, which the next prompt begins with
for (const stream of [false, true]) {
  const options = { model: openai("demo"), messages, tools: { add }, stopWhen: stepCountIs(4) };
  const answer = stream ? streamText(options) : await generateText(options);
  assert.match(await answer.text, /42/);
  const steps = await answer.steps;
  assert.equal(steps.length, 2);
  for (const { content, usage } of steps) {
    assert.ok(content.some((part) => part.type === "reasoning"));
    // All but what is behind the last whole page, if each item that was named stands in the prompt as it was written.
    assert.ok(usage.cachedInputTokens >= known - 32, `${usage.cachedInputTokens} of ${known} tokens were cached`);
    known = usage.totalTokens;
  }
  messages.push(...(await answer.response).messages, { role: "user", content: "And once more?" });
}
assert.deepEqual(asked, [[17, 25], [17, 25]]);
console.log("all is well");
