//! Secrets that a sandbox is given, and those that callers are known by, lie where the documentation says and nowhere else:
//! neither in logs, at whatever level, nor in arguments or environments of processes, in answers to those who may only look,
//! in texts of errors, in figures, on the workspace's disk. docs/guide/secrets.md is what is tested here.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use torpor_proto::openshell::{
    datamodel::v1::{ObjectMeta, Provider},
    v1::{self as os, open_shell_client::OpenShellClient},
};
use torpor_tests::{
    Host, can_run_vms,
    secrets::{Secrets, holding, http, is_private, mark},
};

const DATABASE: [&str; 2] = ["torpor.db", "torpor.db-wal"];
/// Of a sandbox's environment: the record, and what the driver starts it by.
const ENVIRONMENT: [&str; 3] = ["torpor.db", "torpor.db-wal", "spec.json"];

fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A token of an issuer that the gateway trusts by the keys in a file there, and one that is expired.
fn issuer(folder: &Path) -> (String, [String; 2]) {
    use jsonwebtoken::{Algorithm, EncodingKey, Header};
    let key = rcgen::KeyPair::generate().unwrap();
    let point = rcgen::PublicKeyData::der_bytes(&key).to_vec();
    let text = |bytes: &[u8]| base64::Engine::encode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, bytes);
    let set = json!({ "keys": [{
        "kty": "EC", "crv": "P-256", "kid": "one", "use": "sig",
        "x": text(&point[1..33]), "y": text(&point[33..65]),
    }] });
    let jwks = folder.join("keys.json");
    fs::write(&jwks, set.to_string()).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let signed = |expires: u64| {
        let claims =
            json!({ "sub": "alice", "iss": "https://issuer.example", "aud": "torpor", "exp": expires });
        let header = Header { kid: Some("one".into()), ..Header::new(Algorithm::ES256) };
        jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_der(&key.serialize_der())).unwrap()
    };
    let config = format!(
        "[oidc]\nissuer = 'https://issuer.example'\naudience = 'torpor'\njwks = '{}'\nsubject_claim = 'sub'\n",
        jwks.display()
    );
    (config, [signed(now + 3000), signed(now - 3000)])
}

/// A gateway that logs all it can, the secrets so far, and who calls.
struct Case {
    host: Host,
    address: String,
    figures: String,
    admin: String,
    viewer: String,
    secrets: Secrets,
}

impl Case {
    fn new(folder: &Path) -> (Self, [String; 2]) {
        let (oidc, signed) = issuer(folder);
        let (address, figures) = (free(), free());
        let more = format!(
            "enable_sandbox_updates = true\n[[tcp]]\naddress = '{address}'\nplaintext = true\n[metrics]\naddress = '{figures}'\n{oidc}"
        );
        let host = Host::logging(&more, "trace");
        let token =
            |arguments: &[&str]| host.ok(&[&["token", "create"], arguments].concat()).trim().to_owned();
        let (admin, viewer) = (token(&["boss", "--admin"]), token(&["eye", "--role", "viewer"]));
        let mut secrets = Secrets::default();
        // The id before it is no secret.
        for (what, token) in [("admin's token", &admin), ("viewer's token", &viewer)] {
            secrets.add(what, &token[token.len() - 48..], &[]);
        }
        for (what, token) in [("OIDC token", &signed[0]), ("expired OIDC token", &signed[1])] {
            secrets.add(what, token.rsplit('.').next().unwrap(), &[]);
        }
        (Self { host, address, figures, admin, viewer, secrets }, signed)
    }

    fn ask(&self, token: &str, request: &str, body: Option<&Value>) -> (u16, String) {
        let bearer = format!("Bearer {token}");
        let headers = [("Authorization", bearer.as_str()), ("X-Server-Timeout", "20")];
        let body = body.map(Value::to_string).unwrap_or_default();
        let (status, text, _) = http(&self.address, request, &headers, &body, None);
        (status, text)
    }

    fn admin(&self, request: &str, body: &Value) -> String {
        let (status, text) = self.ask(&self.admin, request, Some(body));
        assert_eq!(status, 200, "{request}: {text}");
        text
    }

    fn nothing_in_processes(&self, when: &str) {
        let found = self.secrets.in_processes();
        assert!(found.is_empty(), "{when}: {found:?}");
    }

    fn nothing_in_the_log(&self) {
        let log = self.host.gateway_log();
        assert!(
            log.contains("TRACE") && log.contains("DEBUG") && log.contains("serves at"),
            "it logs too little"
        );
        let found = self.secrets.in_text(&log);
        let line = |what: &String| log.lines().find(|line| self.secrets.in_text(line).contains(what));
        assert!(found.is_empty(), "the log holds {:?}", found.iter().map(line).collect::<Vec<_>>());
    }

    /// At rest, too, each is where it may be and nowhere else, and nobody else reads it there.
    fn files(&self, when: &str) {
        for folder in ["state", "run"] {
            let root = self.host.dir().join(folder);
            let (wrong, right) = self.secrets.in_files(&root);
            assert!(wrong.is_empty(), "{when}: {wrong:#?}");
            for path in right {
                assert!(is_private(&root, &path), "{when}: {} is not its owner's alone", path.display());
            }
        }
    }

    /// All that can be looked at by somebody who may only look, and by nobody in particular.
    fn shown(&self) {
        let views = [
            "GET /v1/sandboxes",
            "GET /v1/sandboxes/box",
            "GET /v1/sandboxes/box/history",
            "GET /v1/sandboxes/box/logs",
            "GET /v1/sandboxes/box/logs?source=SOURCE_CONSOLE",
            "GET /v1/sandboxes/box/disk",
            "GET /v1/templates",
            "GET /v1/templates/base",
            "GET /v1/info",
            "GET /v1/whoami",
            "GET /v1/ports",
            "GET /v1/images",
            "GET /v1/workspaces",
        ];
        for view in views {
            let (status, text) = self.ask(&self.viewer, view, None);
            assert!([200, 403].contains(&status), "{view}: {text}");
            self.secrets.not_in(view, &text);
        }
        let bearer = format!("Bearer {}", self.viewer);
        let headers = [("Authorization", bearer.as_str())];
        let watch = "GET /v1/sandboxes:watch";
        let (_, text, _) = http(&self.address, watch, &headers, "", Some("KIND_SYNCED"));
        assert!(text.contains("\"box\""), "{text}");
        self.secrets.not_in(watch, &text);
        let (status, text, _) = http(&self.figures, "GET /metrics", &[], "", None);
        assert!(status == 200 && text.contains("torpor_"), "{text}");
        self.secrets.not_in("the figures", &text);
        let tokens = self.ask(&self.admin, "GET /v1/tokens?allWorkspaces=true", None).1;
        assert!(tokens.contains("boss"), "{tokens}");
        self.secrets.not_in("the list of tokens", &tokens);
    }
}

/// Requests that are refused with a word about what is next to a secret.
fn refusals(case: &Case, env: &str) {
    let create = |spec: Value| json!({ "name": "bad", "spec": spec });
    let large = format!("{env}{}", "x".repeat(140_000));
    let bodies = [
        ("POST /v1/sandboxes", create(json!({ "environment": { "KEY": format!("{env}\0") } }))),
        ("POST /v1/sandboxes", create(json!({ "environment": { "A=B": env } }))),
        ("POST /v1/sandboxes", create(json!({ "environment": { "KEY": large } }))),
        ("POST /v1/sandboxes", create(json!({ "environment": { "KEY": env }, "image": "nosuch" }))),
        ("POST /v1/sandboxes", create(json!({ "environment": { "KEY": [env] } }))),
        ("POST /v1/sandboxes", create(json!({ "environment": env }))),
        ("POST /v1/sandboxes", create(json!({ "environment": { "KEY": env }, "workdir": "relative" }))),
        ("POST /v1/sandboxes/box:exec", json!({ "argv": ["/no/such"], "environment": { "KEY": env } })),
        (
            "POST /v1/sandboxes/box:exec",
            json!({ "argv": ["true"], "environment": { "KEY": format!("{env}\0") } }),
        ),
        (
            "POST /v1/sandboxes/box:exec",
            json!({ "argv": ["true"], "environment": { "": env }, "user": "nobody here" }),
        ),
        ("PATCH /v1/sandboxes/box", json!({ "environment": { "values": { "KEY": env } } })),
        ("POST /v1/templates", json!({ "name": "BAD", "spec": { "environment": { "KEY": env } } })),
    ];
    let mut told = Vec::new();
    for (request, body) in bodies {
        let (status, text) = case.ask(&case.admin, request, Some(&body));
        assert!(status >= 400 || text.contains("\"error\""), "{request} {status}: {text}");
        if !case.secrets.in_text(&text).is_empty() {
            told.push((request, text));
        }
    }
    assert!(told.is_empty(), "{told:#?}");
    let viewer =
        case.ask(&case.viewer, "POST /v1/sandboxes", Some(&create(json!({ "environment": { "KEY": env } }))));
    assert_eq!(viewer.0, 403, "{}", viewer.1);
    case.secrets.not_in("a refusal of rights", &viewer.1);
}

/// Credentials that are no good, or in a wrong place.
fn odd_credentials(case: &mut Case) {
    let wrong = case.secrets.new_one("wrong", &[]);
    let admin = case.admin.clone();
    let values = [
        format!("Bearer tpr_0011223344556677_{wrong}"),
        format!("Bearer {wrong}"),
        format!("Basic {wrong}"),
        format!("Bearer {}{wrong}", &admin[..admin.len() - 8]),
        wrong.clone(),
    ];
    for value in values {
        let headers = [("Authorization", value.as_str())];
        let (status, text, _) = http(&case.address, "GET /v1/sandboxes", &headers, "", None);
        assert_eq!(status, 401, "{text}");
        case.secrets.not_in("a refusal of credentials", &text);
    }
    let request = format!("GET /v1/sandboxes?access_token={wrong}");
    let (status, _) = case.ask(&admin, &request, None);
    assert_eq!(status, 400);
}

/// A credential of a provider, by the other interface.
fn provider(case: &mut Case) {
    let credential = case.secrets.new_one("credential", &DATABASE);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let shown = runtime.block_on(async {
        let endpoint = format!("http://{}", case.address);
        let channel = tonic::transport::Endpoint::from_shared(endpoint).unwrap().connect().await.unwrap();
        let bearer: tonic::metadata::MetadataValue<_> = format!("Bearer {}", case.admin).parse().unwrap();
        let mut client = OpenShellClient::with_interceptor(channel, move |mut request: tonic::Request<()>| {
            request.metadata_mut().insert("authorization", bearer.clone());
            Ok(request)
        });
        let provider = Provider {
            metadata: Some(ObjectMeta { name: "keys".into(), ..Default::default() }),
            r#type: "generic".into(),
            credentials: [("TOKEN".to_owned(), credential.clone())].into(),
            ..Default::default()
        };
        let create = os::CreateProviderRequest { provider: Some(provider), ..Default::default() };
        let made = client.create_provider(create).await.unwrap().into_inner();
        let attach = os::AttachSandboxProviderRequest {
            sandbox: "box".into(),
            provider: "keys".into(),
            ..Default::default()
        };
        let attached = client.attach_sandbox_provider(attach).await.unwrap().into_inner();
        let listed = client.list_providers(os::ListProvidersRequest::default()).await.unwrap().into_inner();
        format!("{made:?} {attached:?} {listed:?}")
    });
    assert!(shown.contains("keys"), "{shown}");
    // The sandbox that goes with it is shown to who may change it.
    assert_eq!(case.secrets.in_text(&shown), ["environment"]);
}

/// A command that was given a secret, and one that was written one, while they run.
fn commands(case: &mut Case) {
    let given = case.secrets.new_one("exec", &[]);
    let bearer = format!("Bearer {}", case.admin);
    let headers = [("Authorization", bearer.as_str())];
    let body =
        json!({ "argv": ["sh", "-c", "echo ${#GIVEN}; exec sleep 4242"], "environment": { "GIVEN": given } });
    let length = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, format!("{}\n", given.len()));
    let request = "POST /v1/sandboxes/box:exec";
    let (_, _, running) = http(&case.address, request, &headers, &body.to_string(), Some(&length));

    let written = case.secrets.new_one("stdin", &[]);
    let mut command =
        case.host.command(&["exec", "-i", "box", "--", "sh", "-c", "read x; echo ${#x}; read y; exit 0"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{written}").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), written.len().to_string());
    case.nothing_in_processes("while commands run");
    drop((input, running));
    assert!(child.wait().unwrap().success());
}

#[test]
fn secrets_are_where_the_documentation_says_and_nowhere_else() {
    if !can_run_vms("secrets_are_where_the_documentation_says_and_nowhere_else") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut case, [good, expired]) = Case::new(folder.path());
    // What is looked for is found where it is.
    let mut control = Secrets::default();
    let (shown, inherited) = (control.new_one("argument", &[]), control.new_one("variable", &[]));
    let mut sleeps = Command::new("sleep").arg("4242").env("MARK", &inherited).spawn().unwrap();
    let mut shell = Command::new("sh").args(["-c", "read x", &shown]).stdin(Stdio::piped()).spawn().unwrap();
    // They are seen a moment after their start.
    let mut found = std::collections::BTreeSet::new();
    case.host.until("both are seen", |_| {
        found = control.in_processes();
        found.len() == 2
    });
    for child in [&mut sleeps, &mut shell] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(
        found.iter().any(|one| one.contains("cmdline")) && found.iter().any(|one| one.contains("environ"))
    );

    let env = case.secrets.new_one("environment", &ENVIRONMENT);
    let template = case.secrets.new_one("template", &DATABASE);
    case.admin(
        "POST /v1/templates",
        &json!({ "name": "base", "spec": { "environment": { "T": template } } }),
    );
    let main = "echo main has ${#API_KEY}; exec sleep 4242";
    let spec = json!({ "environment": { "API_KEY": env }, "command": ["sh", "-c", main] });
    let made = case.admin("POST /v1/sandboxes", &json!({ "name": "box", "spec": spec, "wait": true }));
    // Who may change it, sees it: this search finds what is there.
    assert_eq!(case.secrets.in_text(&made), ["environment"]);
    let id = case.host.get("box")["id"].as_str().unwrap().to_owned();
    case.host.until("the main command has it", |host| {
        // A guest under emulation on a busy machine may stand still until somebody speaks to it.
        host.run(&["exec", "box", "true"]);
        host.ok(&["logs", "box"]).contains(&format!("main has {}", env.len()))
    });
    let inside = case.host.ok(&["token", "create", "inside", "--sandbox", "box"]);
    case.secrets.add("sandbox's token", &inside.trim()[inside.trim().len() - 48..], &[]);
    assert_eq!(case.ask(inside.trim(), &format!("GET /v1/sandboxes/{id}"), None).0, 200);
    assert!(case.ask(&good, "GET /v1/whoami", None).1.contains("oidc:alice"));
    let late = case.ask(&expired, "GET /v1/whoami", None);
    assert_eq!(late.0, 401);
    case.secrets.not_in("a refusal of an expired token", &late.1);

    case.nothing_in_processes("while it runs");
    provider(&mut case);
    commands(&mut case);
    refusals(&case, &env);
    odd_credentials(&mut case);
    case.shown();
    case.files("while it runs");

    // Another value, by an update: the old one is nowhere any more but in what a database leaves in its pages.
    case.host.ok(&["stop", "box"]);
    let changed = case.secrets.new_one("changed", &ENVIRONMENT);
    let version = case.host.get("box")["version"].clone();
    let update = json!({
        "target": { "expectedVersion": version, "requestId": "change-1" }, "environment": { "values": { "API_KEY": changed } },
    });
    case.admin("PATCH /v1/sandboxes/box", &update);
    let stored = case.host.sandbox_dir(&id).join("spec.json");
    assert!(fs::read_to_string(&stored).unwrap().contains(&changed));
    assert!(!fs::read_to_string(&stored).unwrap().contains(&env));
    case.host.ok(&["start", "box"]);
    case.nothing_in_processes("after an update");

    // What a sandbox writes is on its disk, and is found there: the disk is searched as it is.
    let kept = mark("kept");
    let mut child = case.host.command(&["exec", "-i", "box", "--", "sh", "-c", "cat > /root/kept; sync"]);
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(kept.repeat(100).as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    case.host.ok(&["suspend", "box"]);
    let disks = holding(&case.host.sandbox_dir(&id), &kept);
    assert!(!disks.is_empty() && disks.iter().all(|disk| !disk.ends_with("spec.json")), "{disks:?}");
    case.shown();
    case.files("at rest");

    // Of a token its hash is kept, which is found.
    let hash: String = Sha256::digest(&case.admin).iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!holding(&case.host.dir().join("state"), &hash).is_empty());
    case.nothing_in_the_log();
    let (_, right) = case.secrets.in_files(&case.host.dir().join("state"));
    assert!(right.iter().any(|path| path.ends_with("spec.json")), "{right:?}");

    case.host.ok(&["delete", "box"]);
    case.host.until("its folder is gone", |host| !host.sandbox_dir(&id).exists());
    case.nothing_in_the_log();
    std::thread::sleep(Duration::from_millis(100));
    case.files("after its end");
}
