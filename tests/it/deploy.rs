//! Deployment files: they match the program, and name nothing that does not exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::{Command, Stdio},
};

use fencepost::serve::{CLOSE_TIMEOUT, DRAIN_TIMEOUT};
use fencepost_signals::traces::SHUTDOWN_TIMEOUT;
use fencepost_store::connection::roles::Role;

use crate::docs::read;
use serde::Deserialize;
use serde_json::{Value, json};

fn documents(path: &str) -> Vec<Value> {
    parsed(&read(path))
}

fn parsed(text: &str) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(text)
        .map(|it| Value::deserialize(it).unwrap_or_else(|error| panic!("{text}: {error}")))
        .collect()
}

fn exists(path: &str) -> bool {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists()
}

/// YAML's `<<` is a key like any other to its parser.
fn merged(service: &Value) -> Value {
    if !service["<<"].is_object() {
        return service.clone();
    }
    let mut all = merged(&service["<<"]);
    for (key, value) in service.as_object().expect("a service") {
        all[key] = value.clone();
    }
    all
}

#[test]
fn compose_starts_everything_in_order_with_pinned_images_and_made_passwords() {
    let [compose] = &documents("docker-compose.yml")[..] else { panic!("one document") };
    let services = compose["services"].as_object().expect("services");
    let secrets = compose["secrets"].as_object().expect("secrets");
    let made = read("ops/secrets.sh");
    for (secret, from) in secrets {
        assert_eq!(from["file"], format!("ops/secrets/{secret}"));
        assert!(made.contains(&format!("keep {secret} ")), "nothing creates {secret}");
    }
    for (name, service) in services {
        let service = merged(service);
        let image = service["image"].as_str().expect("an image");
        let (_, tag) = image.rsplit_once(':').unwrap_or_else(|| panic!("{image} is not pinned"));
        assert!(tag.starts_with(|it: char| it.is_ascii_digit() || it == 'v'), "{image}");
        assert!(service["healthcheck"].is_object(), "{name}: how does it do?");
        for secret in service["secrets"].as_array().into_iter().flatten() {
            let source = secret["source"].as_str().or(secret.as_str()).expect("a name");
            assert!(secrets.contains_key(source), "{name}: {secret}");
        }
        assert_eq!(service["cap_drop"], json!(["ALL"]), "{name}");
        assert_eq!(service["security_opt"], json!(["no-new-privileges:true"]), "{name}");
        assert!(service["read_only"] == true || name == "postgres", "{name}");
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().and_then(|it| it.split(':').next()).expect("a source");
            let is_named = compose["volumes"].get(source).is_some();
            assert!(is_named || exists(source), "{name} mounts {source}");
        }
        for (needed, how) in service["depends_on"].as_object().into_iter().flatten() {
            assert!(services.contains_key(needed), "{name} waits for {needed}");
            assert!(how["condition"].is_string(), "{name} waits for {needed} until what?");
        }
        for port in service["ports"].as_array().into_iter().flatten() {
            assert!(port.as_str().is_some_and(|it| it.starts_with("127.0.0.1:")), "{name}: {port}");
        }
        let text = service["environment"].to_string().to_lowercase();
        assert!(!text.contains("password\":\""), "{name} has a password in its environment");
    }
    let nodes = services.values().map(merged);
    let nodes = nodes.filter(|it| it["environment"].get("FENCEPOST_LISTEN").is_some());
    let nodes: Vec<_> = nodes.collect();
    assert_eq!(nodes.len(), 2, "two nodes");
    for node in nodes {
        assert!(!node["secrets"].to_string().contains("database_url"), "the owner's login");
        assert_eq!(node["environment"]["FENCEPOST_DATABASE_ROLES"], "/run/secrets/roles");
        for role in Role::ALL {
            let file = format!("/run/secrets/roles/{}", role.file());
            assert!(node["secrets"].to_string().contains(&file), "{file}");
        }
    }
    let targets = read("ops/prometheus/prometheus.yml");
    assert!(targets.contains("node1:7071") && targets.contains("node2:7071"));
}

#[test]
fn every_setting_in_the_files_is_one_that_the_program_has() {
    let known = read("docs/configuration.md");
    let files = [
        "docker-compose.yml",
        "ops/kubernetes/fencepost.yaml",
        "ops/kubernetes/migrate.yaml",
        "ops/systemd/fencepost.service",
        "ops/helm/fencepost/templates/nodes.yaml",
        "ops/helm/fencepost/templates/migrate.yaml",
        "docs/deploy.md",
    ];
    let mut named = BTreeSet::new();
    for file in files {
        for part in read(file).split("FENCEPOST_").skip(1) {
            let end =
                part.find(|it: char| !it.is_ascii_uppercase() && it != '_').unwrap_or(part.len());
            let setting = format!("FENCEPOST_{}", &part[..end]);
            assert!(known.contains(&format!("`{setting}`")), "{file}: {setting}");
            named.insert(setting);
        }
    }
    assert!(named.len() >= 6, "{named:?}");
}

#[test]
fn a_node_is_given_the_time_that_it_takes_to_end() {
    let deployment = documents("ops/kubernetes/fencepost.yaml").remove(0);
    let pod = &deployment["spec"]["template"]["spec"];
    let grace = pod["terminationGracePeriodSeconds"].as_u64().expect("seconds");
    let environment = pod["containers"][0]["env"].as_array().expect("variables");
    let linger = environment.iter().find(|it| it["name"] == "FENCEPOST_LINGER_SECONDS");
    let linger: u64 =
        linger.and_then(|it| it["value"].as_str()).expect("seconds").parse().expect("a number");
    let needed = (DRAIN_TIMEOUT + CLOSE_TIMEOUT + SHUTDOWN_TIMEOUT).as_secs();
    assert!(grace >= linger + needed, "{grace} s are too few");
    /// The default of `--linger-seconds`.
    const LINGER_SECONDS: u64 = 5;
    let unit = read("ops/systemd/fencepost.service");
    let stop = unit.lines().find_map(|it| it.strip_prefix("TimeoutStopSec=")).expect("a time");
    assert!(stop.parse::<u64>().expect("seconds") >= LINGER_SECONDS + needed);
    let compose = read("docker-compose.yml");
    assert!(compose.contains(&format!("stop_grace_period: {stop}s")));
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        let path = &pod["containers"][0][probe]["httpGet"]["path"];
        assert!(["/readyz", "/livez"].iter().any(|it| path == it), "{probe}: {path}");
    }
}

#[test]
fn every_manifest_is_sound_and_the_image_is_made_of_what_is_there() {
    for file in [
        "fencepost",
        "migrate",
        "examples/monitor",
        "examples/workers-keda",
        "examples/workers-keda-push",
        "examples/workers-hpa",
        "examples/nodes-hpa",
        "examples/postgres",
    ] {
        for document in documents(&format!("ops/kubernetes/{file}.yaml")) {
            assert!(document["kind"].is_string() && document["apiVersion"].is_string(), "{file}");
        }
    }
    for file in ["datasources/prometheus", "dashboards/fencepost"] {
        documents(&format!("ops/grafana/provisioning/{file}.yml"));
    }
    let (docker, ignored) = (read("ops/Dockerfile"), read(".dockerignore"));
    let copied =
        docker.lines().filter_map(|it| it.strip_prefix("COPY ")).filter(|it| !it.starts_with("--"));
    let mut sources = 0;
    for source in copied.flat_map(|it| it.split(' ').rev().skip(1).collect::<Vec<_>>()) {
        assert!(exists(source), "{source}");
        assert!(ignored.lines().any(|it| it == format!("!{source}")), "{source} is ignored");
        sources += 1;
    }
    assert!(sources >= 8);
    assert!(docker.contains(":nonroot") && docker.contains("STOPSIGNAL SIGTERM"));
}

/// What the chart makes of its values, by kind and name.
fn rendered(values: &Value) -> Vec<Value> {
    let chart = documents("ops/helm/fencepost/Chart.yaml").remove(0);
    let about = json!({"Values": values, "Chart": {"AppVersion": chart["appVersion"]}});
    let mut go = Command::new("go");
    go.args(["run", "tests/helm/render.go", "ops/helm/fencepost"]);
    go.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = go.spawn().expect("go is installed");
    let stdin = child.stdin.take().expect("its input");
    serde_json::to_writer(stdin, &about).expect("it reads");
    let output = child.wait_with_output().expect("it runs");
    assert!(output.status.success(), "see above");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut made = parsed(&text);
    made.retain(|it| !it.is_null());
    for it in &mut made {
        // Hooks are Helm's own.
        it["metadata"].as_object_mut().expect("an object").remove("annotations");
    }
    made
}

#[test]
fn the_chart_makes_the_manifests_of_its_default_values_and_takes_others() {
    let named = |all: Vec<Value>| -> BTreeMap<String, Value> {
        let name = |it: &Value| format!("{} {}", it["kind"], it["metadata"]["name"]);
        all.into_iter().map(|it| (name(&it), it)).collect()
    };
    let values = documents("ops/helm/fencepost/values.yaml").remove(0);
    let mut manifests = documents("ops/kubernetes/fencepost.yaml");
    manifests.extend(documents("ops/kubernetes/migrate.yaml"));
    let mut made = rendered(&values);
    for it in &mut made {
        let containers = it.pointer_mut("/spec/template/spec/containers/0");
        if let Some(container) = containers.and_then(Value::as_object_mut) {
            assert_eq!(container.remove("imagePullPolicy"), Some(json!("IfNotPresent")));
        }
    }
    assert_eq!(named(made), named(manifests));

    let schema: Value =
        serde_json::from_str(&read("ops/helm/fencepost/values.schema.json")).expect("JSON");
    let known: BTreeSet<_> = schema["properties"].as_object().expect("properties").keys().collect();
    for name in values.as_object().expect("values").keys() {
        assert!(known.contains(name), "{name} is not in the schema");
    }
    let mut others = values;
    others["replicas"] = json!(5);
    others["image"] =
        json!({"repository": "r.example/fencepost", "tag": "1.2", "pullPolicy": "Always"});
    others["lingerSeconds"] = json!(20);
    others["env"] = json!({"FENCEPOST_SIGNUP": "open"});
    others["secretEnv"] = json!({"FENCEPOST_SMTP_URL": {"secret": "mail", "key": "url"}});
    others["extraVolumes"] = json!([{"name": "oidc", "secret": {"secretName": "oidc"}}]);
    others["extraVolumeMounts"] = json!([{"name": "oidc", "mountPath": "/etc/oidc"}]);
    others["egressPorts"] = json!([443]);
    let made = named(rendered(&others));
    let nodes = &made["\"Deployment\" \"fencepost\""]["spec"];
    let pod = &nodes["template"]["spec"];
    assert_eq!(
        (&nodes["replicas"], &pod["terminationGracePeriodSeconds"]),
        (&json!(5), &json!(55))
    );
    assert_eq!(pod["containers"][0]["image"], "r.example/fencepost:1.2");
    let env = pod["containers"][0]["env"].as_array().expect("variables");
    assert!(env.contains(&json!({"name": "FENCEPOST_SIGNUP", "value": "open"})), "{env:?}");
    let from = json!({"secretKeyRef": {"name": "mail", "key": "url"}});
    let secret = env.iter().find(|it| it["name"] == "FENCEPOST_SMTP_URL").expect("the setting");
    assert_eq!(secret["valueFrom"], from);
    assert_eq!(pod["volumes"][1]["name"], "oidc");
    assert_eq!(pod["containers"][0]["volumeMounts"][1]["mountPath"], "/etc/oidc");
    let egress = &made["\"NetworkPolicy\" \"fencepost\""]["spec"]["egress"];
    assert_eq!(egress.as_array().expect("rules").last(), Some(&json!({"ports": [{"port": 443}]})));
}
