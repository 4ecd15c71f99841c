// An OpenID Connect provider on this machine, for tests. Every visitor is the person that
// PUT /person named last; no page asks.
//
// node provider.mjs PORT REDIRECT_URI SECRET

import { Provider } from "oidc-provider";

const [port, redirectUri, secret] = process.argv.slice(2);
const people = new Map();
let present = { sub: "visitor" };

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: "fencepost",
    client_secret: secret,
    redirect_uris: [redirectUri],
    response_types: ["code"],
    grant_types: ["authorization_code"],
  }],
  claims: { openid: ["sub"], email: ["email", "email_verified"] },
  cookies: { keys: ["of a test"] },
  features: { devInteractions: { enabled: false } },
  findAccount: (_, id) => ({ accountId: id, claims: () => people.get(id) }),
  interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
  pkce: { required: () => true },
});

async function grant(params, accountId) {
  const made = new provider.Grant({ accountId, clientId: params.client_id });
  made.addOIDCScope("openid email");
  return made.save();
}

async function body(request) {
  let text = "";
  for await (const chunk of request) text += chunk;
  return JSON.parse(text);
}

provider.use(async (ctx, next) => {
  if (ctx.path === "/person" && ctx.method === "PUT") {
    present = await body(ctx.req);
    people.set(present.sub, present);
    ctx.status = 204;
  } else if (ctx.path === "/readyz") {
    ctx.status = 200;
  } else if (ctx.path.startsWith("/interaction/")) {
    const { params } = await provider.interactionDetails(ctx.req, ctx.res);
    const consent = { grantId: await grant(params, present.sub) };
    const result = { login: { accountId: present.sub }, consent };
    await provider.interactionFinished(ctx.req, ctx.res, result);
    ctx.respond = false;
  } else {
    await next();
  }
});

provider.listen(Number(port), "127.0.0.1");
