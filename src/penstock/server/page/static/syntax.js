// Colours for code: a scanner that knows comments, strings, numbers and words, and for each language which words mean
// something. It understands no grammar: half a program, which is what an answer shows while it grows, is coloured as well
// as a whole one. Every pattern moves forward and takes what it has looked at, so the time is linear in the text.

import { element } from "./dom.js";

const LONGEST = 30_000; // characters; longer code stays plain, since a growing answer is coloured at every frame

const END = "(?![^])";
const until = (open, close) => `${open}[^]*?(?:${close}|${END})`;
const quoted = (mark, inside = "\\n") => `${mark}[^${mark}\\\\${inside}]*(?:\\\\[^][^${mark}\\\\${inside}]*)*${mark}?`;
const SLASHES = `//[^\\n]*|${until("/\\*", "\\*/")}`;
const HASH = "(?<!\\S)#[^\\n]*";
const QUOTES = `${quoted('"')}|${quoted("'")}`;
const NUMBER = "(?<![\\w.])\\.?\\d[\\w.]*";
const WORD = "[A-Za-z_]\\w*";
const DASHED = "[A-Za-z_][\\w.-]*";

const words = (text) => new Set(text.split(" "));

/** A language: patterns, each for a kind of text, tried in this order, and what words and the text after them say. */
function language({ comment, string, number = NUMBER, word = WORD, other = {}, keywords = "", constants = "", types = true, key = null, folded = false }) {
  const kinds = { comment, ...other, string, number, word };
  const pattern = Object.entries(kinds).filter(([, source]) => source).map(([kind, source]) => `(?<${kind}>${source})`).join("|");
  return { pattern: new RegExp(pattern, "gm"), keywords: words(keywords), constants: words(constants), types, key, folded };
}

const C_LIKE = { comment: SLASHES, string: QUOTES };
const FLOW = "break case catch continue default do else finally for if return switch throw try while";

const JAVASCRIPT = language({
  comment: SLASHES,
  string: `${QUOTES}|${quoted("`", "")}`,
  word: "[A-Za-z_$][\\w$]*",
  keywords: `${FLOW} abstract as async await class const debugger declare delete enum export extends from function get implements import in instanceof interface let new of private protected public readonly set static super this type typeof var void with yield`,
  constants: "Infinity NaN any boolean false never null number object string true undefined unknown",
});
const PYTHON = language({
  comment: "#[^\\n]*",
  string: `(?:\\b[rbfuRBFU]{1,2})?(?:${until('"""', '"""')}|${until("'''", "'''")}|${QUOTES})`,
  other: { meta: "^[ \\t]*@[\\w.]+" },
  keywords: "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield",
  constants: "False None True bool bytes cls dict float int list self set str tuple",
});
const SHELL = language({
  comment: HASH,
  string: `${quoted('"', "")}|'[^']*'?`,
  word: DASHED,
  other: { property: "\\$\\{[^}\\n]*\\}?|\\$[\\w@#?*!-]", constant: "(?<=\\s)--?[A-Za-z][\\w-]*" },
  keywords: "case do done elif else esac export fi for function if in local return set sudo then until while cd echo source",
  types: false,
});
const LANGUAGES = {
  python: PYTHON,
  javascript: JAVASCRIPT,
  json: language({ comment: SLASHES, string: quoted('"'), constants: "false null true", key: /\s*:/y }),
  bash: SHELL,
  c: language({
    ...C_LIKE,
    other: { meta: "^[ \\t]*#[ \\t]*\\w+" },
    keywords: `${FLOW} alignas auto class concept const constexpr delete enum explicit extern friend goto inline namespace new noexcept operator override private protected public register requires sizeof static struct template this typedef typename union using virtual volatile`,
    constants: "NULL bool char double false float int int32_t int64_t long nullptr short signed size_t true uint32_t uint64_t uint8_t unsigned void",
  }),
  java: language({
    ...C_LIKE,
    other: { meta: "@\\w+" },
    keywords: `${FLOW} abstract as async await base class const data enum event extends final foreach fun get implements import in instanceof interface internal is let namespace native new object out override package private protected public readonly record sealed set static super this throws using val var virtual volatile when where yield`,
    constants: "bool boolean byte char double false float int long null short string true void",
  }),
  go: language({
    comment: SLASHES,
    string: `${QUOTES}|\`[^\`]*\`?`,
    keywords: `${FLOW} chan const defer fallthrough func go goto import interface map package range select struct type var`,
    constants: "any bool byte error false float32 float64 int int32 int64 iota nil rune string true uint uint64",
  }),
  rust: language({
    comment: SLASHES,
    string: `${quoted('"', "")}|'(?:[^'\\\\\\n]|\\\\.)'`,
    other: { meta: "#!?\\[[^\\]\\n]*\\]?" },
    keywords: "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait type unsafe use where while",
    constants: "bool char f32 f64 false i16 i32 i64 i8 isize str true u16 u32 u64 u8 usize None Some Ok Err",
  }),
  ruby: language({
    comment: HASH,
    string: QUOTES,
    other: { constant: "(?<![\\w:]):[A-Za-z_]\\w*", property: "@{1,2}\\w+" },
    keywords: "alias and begin break case class def do else elsif end ensure for if in module next not or redo require rescue retry return self super then unless until when while yield",
    constants: "false nil true",
  }),
  php: language({
    comment: `${SLASHES}|#[^\\n\\[]*`,
    string: QUOTES,
    other: { property: "\\$\\w+", meta: "<\\?(?:php|=)?|\\?>" },
    keywords: `${FLOW} abstract as class const echo extends final fn foreach function implements interface match namespace new private protected public readonly static trait use var yield`,
    constants: "array bool false float int null self string true void",
  }),
  lua: language({
    comment: `${until("--\\[\\[", "\\]\\]")}|--[^\\n]*`,
    string: QUOTES,
    keywords: "and break do else elseif end for function goto if in local not or repeat return then until while",
    constants: "false nil true",
  }),
  sql: language({
    comment: `--[^\\n]*|${until("/\\*", "\\*/")}`,
    string: QUOTES,
    keywords: "add all alter and as asc begin between by case check commit constraint create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not offset on or order outer over partition primary references right rollback select set table then union unique update using values view when where with",
    constants: "bigint boolean char date decimal false float int integer null numeric real serial text timestamp true varchar",
    folded: true,
    types: false,
  }),
  css: language({
    comment: until("/\\*", "\\*/"),
    string: QUOTES,
    number: "#[\\da-fA-F]{3,8}\\b|(?<![\\w-])[+-]?\\.?\\d[\\w.%]*",
    word: "-{0,2}[A-Za-z_][\\w-]*",
    other: { keyword: "@[\\w-]+|!important" },
    key: /\s*:(?!:)/y,
    types: false,
  }),
  yaml: language({ comment: HASH, string: QUOTES, word: DASHED, constants: "false no null true yes", key: /\s*:(?=\s|$)/y, types: false }),
  toml: language({ comment: HASH, string: QUOTES, word: DASHED, other: { meta: "^\\[[^\\]\\n]*\\]{0,2}" }, constants: "false true", key: /\s*=/y, types: false }),
  html: language({
    comment: until("<!--", "-->"),
    string: `(?<==)(?:"[^"<]*"?|'[^'<]*'?)`,
    number: "",
    word: "[A-Za-z_:][\\w:-]*",
    other: { keyword: "</?[A-Za-z][\\w:-]*|/?>|<!\\w+" },
    key: /=/y,
    types: false,
  }),
  diff: language({
    string: "",
    number: "",
    word: "",
    other: { meta: "^(?:@@|diff |index |\\+\\+\\+ |--- )[^\\n]*", added: "^\\+[^\\n]*", removed: "^-[^\\n]*" },
  }),
};

const ALIASES = {
  python: "py python3 pycon pyi",
  javascript: "js jsx mjs ts tsx typescript node",
  json: "json5 jsonc jsonl",
  bash: "sh shell zsh console terminal shell-session powershell dockerfile makefile",
  c: "cpp c++ cc h hpp objc cuda",
  java: "kotlin kt csharp c# cs scala swift dart",
  go: "golang",
  rust: "rs",
  ruby: "rb",
  yaml: "yml",
  toml: "ini cfg",
  html: "xml svg vue xhtml",
  css: "scss less",
  sql: "postgresql mysql sqlite",
  diff: "patch",
};
const BY_NAME = new Map(Object.entries(LANGUAGES));
for (const [name, aliases] of Object.entries(ALIASES)) for (const alias of aliases.split(" ")) BY_NAME.set(alias, LANGUAGES[name]);

/** The nodes of a piece of code; plain text if the language is not known. */
export function highlighted(text, name) {
  const known = BY_NAME.get(name.toLowerCase());
  if (!known || text.length > LONGEST) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  for (const match of text.matchAll(known.pattern)) {
    plain += text.slice(at, match.index);
    at = match.index + match[0].length;
    const kind = kindOf(match, text, at, known);
    if (kind) {
      if (plain) nodes.push(plain);
      nodes.push(element("span", { class: `code-${kind}` }, match[0]));
      plain = "";
    } else {
      plain += match[0];
    }
  }
  nodes.push(plain + text.slice(at));
  return nodes;
}

function kindOf({ groups, 0: found }, text, end, known) {
  const kind = Object.keys(groups).find((each) => groups[each] !== undefined);
  if (kind !== "word" && kind !== "string") return kind;
  if (known.key && follows(known.key, text, end)) return "property";
  if (kind === "string") return kind;
  const word = known.folded ? found.toLowerCase() : found;
  if (known.keywords.has(word)) return "keyword";
  if (known.constants.has(word)) return "constant";
  if (follows(CALL, text, end)) return "call";
  return known.types && TYPE.test(found) ? "type" : null;
}

const CALL = /\(/y;
const TYPE = /^[A-Z]\w*[a-z]/;

function follows(sticky, text, at) {
  sticky.lastIndex = at;
  return sticky.test(text);
}
