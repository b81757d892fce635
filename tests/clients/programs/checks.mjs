// Runs the checks of a program, as checks.py does: `passed NAME`, `failed NAME`, `skipped NAME: REASON`.

export const URL = process.argv[2];
export const MODEL = "demo";

const checks = [];

export class Skipped extends Error {}

export function check(name, run) {
  checks.push([name, run]);
}

export async function requireRoute(path) {
  const { paths } = await (await fetch(URL + "/openapi.json")).json();
  if (!(path in paths)) throw new Skipped(`the server has no route ${path}`);
}

export async function main() {
  let failed = 0;
  for (const [name, run] of checks) {
    try {
      await run();
      console.log(`passed ${name}`);
    } catch (error) {
      if (error instanceof Skipped) {
        console.log(`skipped ${name}: ${error.message}`);
        continue;
      }
      failed += 1;
      console.error(error);
      console.log(`failed ${name}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
