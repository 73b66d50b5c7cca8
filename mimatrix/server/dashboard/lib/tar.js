// Files as a gzipped tar archive, in the format that every tar reads (ustar).

const BLOCK = 512;
const encoder = new TextEncoder();

/** The archive of [{name, bytes}], always the same for the same files. */
export async function archive(files) {
  const parts = [];
  for (const { name, bytes } of files) {
    parts.push(header(name, bytes.length), bytes, new Uint8Array((BLOCK - (bytes.length % BLOCK)) % BLOCK));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  const packed = new Blob(parts).stream().pipeThrough(new CompressionStream("gzip"));
  return new Uint8Array(await new Response(packed).arrayBuffer());
}

/** SHA-256, as 64 digits. */
export async function digest(bytes) {
  const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function header(name, size) {
  const said = encoder.encode(name);
  if (said.length > 100) throw new Error(`"${name}" is too long a name; use one of at most 100 bytes.`);
  const block = new Uint8Array(BLOCK);
  const put = (text, at) => block.set(encoder.encode(text), at);
  const octal = (value, digits) => `${value.toString(8).padStart(digits, "0")}\0`;
  block.set(said, 0);
  put(octal(0o644, 7), 100);
  put(octal(0, 7), 108);
  put(octal(0, 7), 116);
  put(octal(size, 11), 124);
  put(octal(0, 11), 136);
  put(" ".repeat(8), 148);
  put("0", 156);
  put("ustar\0" + "00", 257);
  const sum = block.reduce((total, byte) => total + byte, 0);
  put(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
  return block;
}
