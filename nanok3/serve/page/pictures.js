// Pictures that a user gives, as data URLs; large ones are made smaller, since the browser keeps them with the text, and of
// what may be an animation the first picture is taken, since the server wants a still one.

export const MAX_PICTURES = 10;
export const MAX_FILE = 50_000_000; // bytes
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOVING = ["image/webp", "image/gif"];
const LARGE = 1_000_000; // bytes
const LONGEST_SIDE = 2048;

// `wrong` are sentences about the files that are not among the pictures: {url, name}.
export async function picturesIn(files) {
  const found = [];
  const wrong = [];
  for (const file of files) {
    if (file.size > MAX_FILE) {
      wrong.push(`${file.name} has ${megabytes(file.size)}; a picture may have ${megabytes(MAX_FILE)}.`);
      continue;
    }
    const url = TYPES.includes(file.type) ? await urlOf(file).catch(() => null) : null;
    if (url) found.push({ url, name: file.name });
    else wrong.push(`${file.name} is no picture that can be read; PNG, JPEG, WebP and GIF are.`);
  }
  return { found, wrong };
}

const megabytes = (bytes) => `${Math.ceil(bytes / 1_000_000)} MB`;

async function urlOf(file) {
  const bitmap = await createImageBitmap(file); // fails if it is no picture, whatever its name
  const large = file.size > LARGE;
  if (!large && !MOVING.includes(file.type)) return read(file);
  const scale = large ? Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height)) : 1;
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const paper = canvas.getContext("2d");
  if (large) {
    paper.fillStyle = "white"; // JPEG has no transparency
    paper.fillRect(0, 0, width, height);
  }
  paper.drawImage(bitmap, 0, 0, width, height);
  return large ? canvas.toDataURL("image/jpeg", 0.9) : canvas.toDataURL("image/png");
}

function read(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
