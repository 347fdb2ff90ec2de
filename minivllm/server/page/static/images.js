// Images that the user attaches to a message: read, reduced if they are large, and shown before they are sent.
import { el } from "./render.js";

const $ = (id) => document.getElementById(id);
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_FILE = 20 * 2 ** 20; // bytes of a file that is read
const SMALL = 400_000; // bytes up to which a file is sent as it is
const SIDE = 1536; // pixels of the longest side of a reduced image
const DATA = /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/]+={0,2}$/;

export const isImage = (url) => typeof url === "string" && DATA.test(url);

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: the file cannot be read`));
    reader.readAsDataURL(file);
  });
}

// Return {name, url, w, h, reduced} of a file.  An Error has the reason for which it is refused.
export async function readImage(file) {
  const name = (file.name || "image").slice(0, 80);
  if (!KINDS.includes(file.type)) throw new Error(`${name}: expected an image in PNG, JPEG, WebP, GIF or BMP`);
  if (file.size > MOST_FILE) throw new Error(`${name}: ${(file.size / 2 ** 20).toFixed(0)} MiB; expected at most ${MOST_FILE / 2 ** 20} MiB`);
  let bitmap;
  try { bitmap = await createImageBitmap(file); } catch { throw new Error(`${name}: the browser cannot read it as an image`); }
  const { width, height } = bitmap;
  try {
    if (file.size <= SMALL) return { name, url: await dataUrl(file), w: width, h: height };
    const scale = Math.min(1, SIDE / Math.max(width, height));
    const canvas = document.createElement("canvas");
    const w = canvas.width = Math.max(1, Math.round(width * scale)), h = canvas.height = Math.max(1, Math.round(height * scale));
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#fff"; pen.fillRect(0, 0, w, h); // transparent pixels become white, as the server makes them
    pen.drawImage(bitmap, 0, 0, w, h);
    return { name, url: canvas.toDataURL("image/jpeg", 0.88), w, h, reduced: true };
  } finally { bitmap.close(); }
}

function caption(image) { return `${image.name}, ${image.w} × ${image.h}${image.reduced ? ", reduced and sent as JPEG" : ""}`; }

// The images of a message as elements.
export function pictures(images) {
  return el("div", { class: "pictures" }, ...images.map((image) => (isImage(image.url)
    ? el("img", { src: image.url, alt: image.name, title: caption(image) })
    : el("span", { class: "dim", text: `${image.name} (not stored any more, so it is not sent again)` }))));
}

// The images that wait to be sent with the next message.
export class Attached {
  constructor(notice) {
    this.notice = notice; this.list = []; this.most = 0; this.reading = Promise.resolve();
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => { this.add([...$("files").files]); $("files").value = ""; });
    $("ask").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (files.length) { event.preventDefault(); this.add(files); }
    });
    // a dropped file must never replace the page, so the whole page accepts it
    document.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault(); this.add([...event.dataTransfer.files]);
    });
  }

  // most: images that a request may have; 0 means that the model reads text only
  allow(most) { this.most = most; $("attach").hidden = !most; if (!most) { this.list = []; this.draw(); } }

  add(files) { this.reading = this.reading.then(() => this.read(files)); return this.reading; }

  async read(files) {
    this.notice("");
    if (!this.most) { this.notice("This model reads text only, so images cannot be attached."); return; }
    for (const file of files) {
      if (this.list.length >= this.most) { this.notice(`A message may have at most ${this.most} images.`); break; }
      try { this.list.push(await readImage(file)); } catch (error) { this.notice(error.message); }
    }
    this.draw();
  }

  take() { const { list } = this; this.list = []; this.draw(); return list; }

  draw() {
    $("attached").hidden = !this.list.length;
    $("attached").replaceChildren(...this.list.map((image) => el("figure", {}, el("img", { src: image.url, alt: "" }), el("figcaption", { text: caption(image) }),
      el("button", { type: "button", text: "×", "aria-label": `Remove ${image.name}`, on: { click: () => { this.list = this.list.filter((one) => one !== image); this.draw(); $("ask").focus(); } } }))));
  }
}
