// What is asked: bodies of requests, from a chat and what of it is looked at.
import {contentOf} from "./attachments.js";

// The fields that the panel has for a request: name, type of the field, what an empty one means.
export const OPTIONS = [["temperature", "number", "0: greedy"], ["top_p", "number", "0 to 1"], ["top_k", "number", "0: off"],
  ["min_p", "number", "0 to 1"], ["repetition_penalty", "number", "1: off"], ["max_tokens", "number", "context"],
  ["seed", "number", "random"], ["stop", "text", "a text"]];
const COMPLETION_TOKENS = 256;  // a base model seldom ends by itself

function options(settings) {
  const body = {stream: true, stream_options: {include_usage: true}};
  for (const [name, type] of OPTIONS) {
    const value = settings.options[name] ?? "";
    if (value !== "") body[name] = type === "number" ? Number(value) : value;
  }
  return body;
}

// {route, body, textOf}: `before` are the turns that lead to `turn`, whose answer goes on where it has one. `textOf`: what
// a choice of a chunk brings. A model without a chat template goes on with the text of the question alone. Throws Error with
// words for the reader.
export async function requestFor(settings, before, turn, hasTemplate) {
  if (!hasTemplate) {
    const content = await contentOf(turn);
    if (typeof content !== "string") throw new Error("a model without a chat template takes no pictures");
    const body = {prompt: content + turn.answer, max_tokens: COMPLETION_TOKENS, ...options(settings)};
    return {route: "v1/completions", body, textOf: choice => ({content: choice.text})};
  }
  const messages = settings.system ? [{role: "system", content: settings.system}] : [];
  for (const {answer, ...asked} of before)  // a question that has no answer is never sent again
    if (answer) messages.push({role: "user", content: await contentOf(asked)}, {role: "assistant", content: answer});
  messages.push({role: "user", content: await contentOf(turn)});
  const body = {messages, ...options(settings)};
  if (turn.answer) {
    messages.push({role: "assistant", content: turn.answer});
    Object.assign(body, {continue_final_message: true, add_generation_prompt: false});
  }
  return {route: "v1/chat/completions", body, textOf: choice => choice.delta};
}
