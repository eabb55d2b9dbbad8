// A conversation's messages are a tree: editing a message or having it answered again adds a branch and forgets nothing.
// All messages lie in `conversation.messages` in the order they were written. Each names the one it follows by its place
// there (`parent`, -1 for none) and, where several follow it, the one that was shown last (`shown`). `conversation.leaf` is
// the place of the last message on the page, -1 while there is none.

/** What is on the page: the messages from the first to the leaf. */
export function path({ messages, leaf }) {
  const found = [];
  for (let at = leaf; at >= 0; at = messages[at].parent) found.push(messages[at]);
  return found.reverse();
}

/** Add a message after the one at `parent`, and show it. */
export function add(conversation, message, parent = conversation.leaf) {
  message.parent = parent;
  lead(conversation, conversation.messages.push(message) - 1);
}

/** The versions of this message (all messages with its parent), itself included, the oldest first. */
export function versions({ messages }, message) {
  return messages.filter(({ parent, role }) => parent === message.parent && role === message.role);
}

/** Show the branch of this message, down to the message that was last shown there. */
export function turnTo(conversation, message) {
  const { messages } = conversation;
  let at = messages.indexOf(message);
  for (let next = at; next >= 0; next = after(messages, at)) at = next;
  lead(conversation, at);
}

function after(messages, at) {
  return messages[at].shown ?? messages.findLastIndex(({ parent }) => parent === at);
}

/** Make `leaf` the last message on the page; every message above remembers the way to it. */
function lead(conversation, leaf) {
  conversation.leaf = leaf;
  for (let at = leaf; at >= 0; at = conversation.messages[at].parent) {
    const above = conversation.messages[conversation.messages[at].parent];
    if (above) above.shown = at;
  }
}
