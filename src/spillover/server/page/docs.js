"use strict";

// Writes /openapi.json as a page. All text goes in as text, never as HTML.

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function resolve(api, schema) {
  const name = schema && schema.$ref && schema.$ref.split("/").pop();
  return name ? { name, ...api.components.schemas[name] } : schema || {};
}

function kind(api, schema, depth = 0) {
  if (!schema || depth > 4) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const forms = schema.anyOf || schema.oneOf;
  if (forms) return [...new Set(forms.map((form) => kind(api, form, depth + 1)))].filter((text) => text !== "null").join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${kind(api, schema.items, depth + 1)}]`;
  return schema.type || "any";
}

function fields(api, schema) {
  const table = make("table");
  const head = table.appendChild(make("tr"));
  for (const title of ["field", "type", ""]) head.append(make("th", title));
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = table.appendChild(make("tr"));
    const needed = (schema.required || []).includes(name);
    row.append(make("td", name, needed ? { class: "needed" } : {}), make("td", kind(api, field)));
    const notes = [needed ? "required" : "", field.description || "",
      field.default !== undefined && field.default !== null ? `default ${JSON.stringify(field.default)}` : ""];
    row.append(make("td", notes.filter(Boolean).join("; ")));
  }
  return table;
}

function operation(api, path, method, entry) {
  const section = make("section", null, { id: entry.operationId });
  section.append(make("h2", `${method.toUpperCase()} ${path}`));
  if (entry.description || entry.summary) section.append(make("p", entry.description || entry.summary));
  const content = entry.requestBody && entry.requestBody.content["application/json"];
  for (const form of content ? content.schema.anyOf || [content.schema] : []) {
    const schema = resolve(api, form);
    section.append(make("h3", `Body: ${schema.name || "JSON"}`), fields(api, schema));
  }
  const answers = Object.entries(entry.responses || {}).map(([status, one]) => `${status} ${one.description}`);
  section.append(make("h3", "Answers"), make("p", answers.join(" · ")));
  return section;
}

async function show() {
  const about = document.getElementById("about");
  try {
    const api = await (await fetch("/openapi.json")).json();
    about.textContent = `${api.info.title} ${api.info.version}: ${api.info.description}`;
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, entry] of Object.entries(methods)) {
        document.getElementById("operations").append(operation(api, path, method, entry));
        document.getElementById("routes").append(
          make("a", `${method.toUpperCase()} ${path}`, { href: `#${entry.operationId}` }));
      }
    }
  } catch (error) {
    about.textContent = `The server's description could not be read: ${error}`;
  }
}

show();
