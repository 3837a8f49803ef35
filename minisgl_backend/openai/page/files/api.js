// The server's routes as a table, from its OpenAPI description.
import {$, element} from "./elements.js";

try {
  const {paths} = await (await fetch("../openapi.json")).json();
  for (const [path, methods] of Object.entries(paths))
    for (const [method, {requestBody}] of Object.entries(methods)) {
      const row = element("tr"), schema = Object.values(requestBody?.content || {})[0]?.schema;
      row.append(element("td", "", method.toUpperCase()), element("td", "", path), element("td", "", schema?.$ref?.split("/").at(-1) || ""));
      $("routes").append(row);
    }
} catch { $("routes").append(element("tr", "error", "the server cannot be reached, or asks for its API key")); }
