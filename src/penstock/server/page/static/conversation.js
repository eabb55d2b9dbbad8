// Has an answer generated, one at a time. Measures times as a person at the page sees them. Whatever ends the answer, the
// message is left in a state that can be stored.

import { chatChunks } from "./api.js";
import { path } from "./thread.js";
import { ALTERNATIVES, tokenOf } from "./tokens.js";

export class Answering {
  /** `onProgress` is called at most once a frame while the answer grows, `onEnd` once. */
  constructor(conversation, message, { onProgress, onEnd }) {
    this.conversation = conversation;
    this.message = message;
    this.onProgress = onProgress;
    this.onEnd = onEnd;
    this.controller = new AbortController();
    this.frame = 0;
  }

  /** End the answer now; what has arrived stays. */
  stop() {
    this.controller.abort();
  }

  async run(body) {
    const { message } = this;
    message.running = true;
    this.begun = performance.now();
    try {
      for await (const chunk of chatChunks(body, this.controller.signal)) this.take(chunk);
    } catch (error) {
      if (error.name === "AbortError") message.ending = "stopped";
      else this.fail(error);
    }
    this.measure();
    delete message.running;
    cancelAnimationFrame(this.frame);
    this.onEnd(this);
  }

  fail(error) {
    this.message.error = error.message;
    this.failure = error;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.id) this.message.answer = chunk.id; // the id under which the server remembers where its time went
    const [choice] = chunk.choices;
    if (!choice) return;
    if (choice.finish_reason) this.message.ending = choice.finish_reason;
    const tokens = choice.logprobs?.content;
    if (tokens?.length) (this.message.tokens ??= []).push(...tokens.map(tokenOf));
    const { content = "", reasoning_content: reasoning = "" } = choice.delta;
    if (!content && !reasoning) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.message.content += content;
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.onProgress(this);
    });
  }

  /** Measure what the answer cost; if it was stopped, up to that point. */
  measure() {
    if (this.first === undefined) return;
    const tokens = this.usage.completion_tokens;
    const elapsed = this.last - this.first;
    this.message.stats = {
      ttft: this.first - this.begun,
      rate: tokens > 1 && elapsed > 0 ? ((tokens - 1) / elapsed) * 1000 : 0,
      tokens,
      prompt: this.usage.prompt_tokens,
      cached: this.usage.prompt_tokens_details?.cached_tokens ?? 0, // only the end of an answer says
    };
  }
}

/** The request that has the last message of a conversation answered. */
export function requestFor(conversation, model) {
  const said = path(conversation).filter((message) => !message.running && message.content);
  const messages = said.map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const probabilities = conversation.logprobs ? { logprobs: true, top_logprobs: ALTERNATIVES } : {};
  // Before the page knows what is served, the server chooses.
  return { ...conversation.sampling, ...probabilities, ...(model ? { model } : {}), messages };
}
