// Pictures that a user gives, as data URLs; large ones are made smaller, since the browser keeps them with the text.

export const MAX_PICTURES = 10;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LARGE = 1_000_000; // bytes
const LONGEST_SIDE = 2048;

// `wrong` are the names of files that are no pictures.
export async function picturesIn(files) {
  const urls = [];
  const wrong = [];
  for (const file of files) {
    const url = TYPES.includes(file.type) ? await urlOf(file).catch(() => null) : null;
    if (url) urls.push(url);
    else wrong.push(file.name);
  }
  return { urls, wrong };
}

async function urlOf(file) {
  const bitmap = await createImageBitmap(file); // fails if it is no picture, whatever its name
  if (file.size <= LARGE) return read(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = Object.assign(document.createElement("canvas"), { width: bitmap.width * scale, height: bitmap.height * scale });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
