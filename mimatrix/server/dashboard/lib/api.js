// Requests to the server with the user's token; errors are sentences.

const KEY = "mimatrix-token";
const PATIENCE_MS = 15_000;
const UPLOAD_MS = 300_000;
/** The server's clock is known to a second, and an answer takes some time. */
const SAME_CLOCK_MS = 2_000;
let ahead_ms = 0;

/** The time by the server's clock, in ms: that of the browser may be wrong. */
export const now = () => Date.now() + ahead_ms;

/** The server refused a request; the message is its sentence. */
export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/** No answer, or one from a proxy in between. */
export class Away extends Error {}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  set(secret, keep) {
    this.forget();
    (keep ? localStorage : sessionStorage).setItem(KEY, secret);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

/** The answer to `GET /api` + path; `absent` in place of a 404, if it is given. */
export async function get(path, { absent, secret } = {}) {
  try {
    return await (await ask("GET", path, { secret })).json();
  } catch (error) {
    if (absent !== undefined && error.status === 404) return absent;
    throw error;
  }
}

/** The answer to a change, with `said` as JSON. */
export async function send(method, path, said) {
  const body = said === undefined ? undefined : JSON.stringify(said);
  return (await ask(method, path, { body, kind: "application/json" })).json();
}

/** Whether a resource exists. */
export async function has(path) {
  try {
    await ask("HEAD", path);
    return true;
  } catch (error) {
    if (error.status === 404) return false;
    throw error;
  }
}

/** Upload bytes. */
export async function upload(path, body) {
  await ask("PUT", path, { body, kind: "application/octet-stream", patience: UPLOAD_MS });
}

async function ask(method, path, { body, kind, secret, patience = PATIENCE_MS } = {}) {
  const headers = { Authorization: `Bearer ${secret ?? token.get()}` };
  if (body !== undefined) headers["Content-Type"] = kind;
  let answer;
  try {
    answer = await fetch(`api${path}`, {
      method,
      headers,
      body,
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(patience),
    });
  } catch {
    throw new Away("The server does not answer.");
  }
  setClock(Date.parse(answer.headers.get("Date")));
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  if (answer.status >= 502) throw new Away(said.detail ? sentence(said.detail) : "The server is not ready.");
  throw new Refused(answer.status, sentence(said.detail ?? `the server answered ${answer.status}`));
}

function setClock(told_ms) {
  const found_ms = told_ms + 500 - Date.now();
  if (Math.abs(found_ms - ahead_ms) > SAME_CLOCK_MS) ahead_ms = Math.abs(found_ms) > SAME_CLOCK_MS ? found_ms : 0;
}

function sentence(said) {
  return said[0].toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".");
}
