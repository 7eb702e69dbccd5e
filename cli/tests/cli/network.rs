//! Egress policies, exposed ports and forwards, against the fake gateway.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    process::Stdio,
};

use serde_json::Value;
use torpor_sdk::v1::{self, Phase, egress::Policy};

use crate::fake::{Fake, at, sandbox};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn create_tells_the_policy_and_its_rules_and_refuses_rules_of_another_policy() {
    let fake = Fake::start();
    let asked = |args: &[&str]| {
        let done = fake.run(&[&["create", "--no-wait"], args].concat());
        assert_eq!(done.code, 0, "{}", done.stderr);
        fake.state.created.lock().unwrap().take().unwrap().spec.unwrap().egress
    };
    assert_eq!(asked(&["a"]), None);
    assert_eq!(asked(&["b", "--egress", "default"]), None);
    assert_eq!(asked(&["c", "--egress", "none"]).unwrap().policy(), Policy::None);
    let allowed =
        asked(&["d", "--allow", "192.0.2.0/24:443", "--allow", "192.0.2.7", "--allow-names"]).unwrap();
    assert_eq!((allowed.policy(), allowed.allow_names), (Policy::Allow, true));
    assert_eq!(allowed.allow, ["192.0.2.0/24:443", "192.0.2.7"]);
    let done = fake.run(&["create", "e", "--egress", "open", "--allow", "192.0.2.7"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    assert!(done.stderr.contains("--egress allow"), "{}", done.stderr);
}

#[test]
fn network_shows_the_policy_and_changes_it() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    let done = fake.run(&[
        "sandbox",
        "network",
        "web",
        "--egress",
        "allow",
        "--allow",
        "192.0.2.7:443",
        "-o",
        "json",
    ]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let shown = json(&done.stdout);
    assert_eq!(shown["egress"]["policy"], "allow");
    assert_eq!(shown["egress"]["allow"][0], "192.0.2.7:443");
    assert_eq!((&shown["egress"]["default"], &shown["ip"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(shown["exposed"][0]["host"], "127.0.0.1:40000");
    assert!(fake.calls()[0].starts_with("egress web ") && fake.calls()[0].len() > "egress web ".len());
    let done = fake.run(&["network", "web"]);
    assert!(done.stdout.contains("allow 192.0.2.7:443"), "{}", done.stdout);
    let shown = json(&fake.run(&["get", "web", "-o", "json"]).stdout);
    assert_eq!(shown["egress"]["policy"], "allow");
}

#[test]
fn ports_are_exposed_listed_and_taken_back() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Suspended));
    let done = fake.run(&["expose", "web", "80", "--host", "0.0.0.0:40000", "--wake"]);
    assert_eq!(done.stdout, "web 80 at 127.0.0.1:40000, wakes it\n");
    assert_eq!(fake.calls(), ["expose web 0.0.0.0:40000"]);
    assert_eq!(fake.run(&["expose", "web", "80", "-q"]).stdout, "127.0.0.1:40000\n");
    let rows = json(&fake.run(&["expose", "list", "web", "-o", "json"]).stdout);
    assert_eq!((&rows[0]["port"], &rows[0]["wake"]), (&80.into(), &true.into()));
    assert_eq!(json(&fake.run(&["expose", "list", "-o", "json"]).stdout), json("[]"));
    assert_eq!(fake.run(&["expose", "rm", "web", "80"]).stdout, "web 80 is no longer exposed\n");
    for wrong in [&["expose", "web"][..], &["expose", "web", "0"], &["expose", "web", "65536"]] {
        assert_eq!(fake.run(wrong).code, 2, "{wrong:?}");
    }
}

#[test]
fn a_forward_carries_both_ways_and_ends_with_the_run() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    let mut forward = fake
        .torpor(&["forward", "web", "0:80", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(forward.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let told = json(&line);
    assert_eq!((&told["name"], &told["port"]), (&"web".into(), &80.into()));
    let mut stream = TcpStream::connect(told["local"].as_str().unwrap()).unwrap();
    stream.write_all(b"hello").unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"HELLO");
    // This half ends, the other goes on.
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "the end");
    fake.put(v1::Sandbox { status: Some(at(Phase::Suspending)), ..sandbox("web", Phase::Ready) });
    let code = forward.wait().unwrap().code();
    let mut errors = String::new();
    forward.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(code, Some(4), "{errors}");
    assert!(errors.contains("Suspending") && errors.contains("next: torpor resume web"), "{errors}");
    let done = fake.run(&["forward", "web", "80"]);
    assert_eq!(done.code, 4, "{}", done.stderr);
}
