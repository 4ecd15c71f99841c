//! `docs/configuration.md`, generated from the flags.

use std::{collections::BTreeMap, fmt::Write};

use clap::{Arg, CommandFactory};

use super::Cli;

/// Text before and after the table.
const ABOVE: &str = include_str!("settings/above.md");
const BELOW: &str = include_str!("settings/below.md");

/// Defaults that depend on more than a constant, in words.
const DEFAULTS: [(&str, &str); 13] = [
    ("redis-url", "none; in `dev`, a private one"),
    ("signup", "`invite`; in `dev`, `open`"),
    ("plans", "the built-in `ops/plans.toml`"),
    ("default-plan", "`free`; in `dev`, `unlimited`"),
    ("public-url", "`http://` and the address of the API"),
    ("smtp-url", "none: no mail; in `dev` it is printed"),
    ("max-connections-per-address", "256; in `dev`, 20000"),
    ("trusted-proxies", "none"),
    ("data-dir", "`.fencepost` here"),
    ("url", "that of a running `dev` here, except for `ready`; else `http://127.0.0.1:7070`"),
    ("api-key", "that of a running `dev` here"),
    ("worker-id", "host, process and random letters"),
    ("adapter", "the native API"),
];

/// Options of a single job, batch or query are no settings.
const NO_SETTINGS: [&str; 3] = ["enqueue", "jobs", "batches"];

/// The page, as it is committed and served.
#[must_use]
pub fn page() -> String {
    let mut page = ABOVE.to_owned();
    let cli = Cli::command();
    // In the order of the first command with each.
    let mut rows: Vec<(&Arg, Vec<&str>)> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for command in cli.get_subcommands() {
        let name = command.get_name();
        for argument in command.get_arguments() {
            let Some(flag) = argument.get_long() else { continue };
            let is_setting = !NO_SETTINGS.contains(&name) || argument.get_env().is_some();
            if ["help", "version"].contains(&flag) || !is_setting {
                continue;
            }
            let place = *places.entry(flag).or_insert(rows.len());
            match rows.get_mut(place) {
                Some((_, names)) => names.push(name),
                None => rows.push((argument, vec![name])),
            }
        }
    }
    for (argument, names) in rows {
        let _ = writeln!(page, "{}", row(argument, &names));
    }
    page + BELOW
}

fn row(argument: &Arg, commands: &[&str]) -> String {
    let flag = argument.get_long().unwrap_or_default();
    let variable = argument.get_env().map(|it| format!("`{}`", it.to_string_lossy()));
    let mut variable = variable.unwrap_or_default();
    if flag == "database-url" {
        variable += ", else `DATABASE_URL`";
    }
    let constant =
        argument.get_default_values().first().filter(|_| argument.get_action().takes_values());
    let constant = constant.map(|it| format!("`{}`", it.to_string_lossy()));
    let words = DEFAULTS.iter().find(|it| it.0 == flag).map(|it| it.1.to_owned());
    let default = words.or(constant).unwrap_or_default();
    let help = argument.get_help().map(|it| it.to_string().replace('|', "\\|")).unwrap_or_default();
    format!("| `--{flag}` | {help} | {variable} | {default} | {} |", commands.join(", "))
}
