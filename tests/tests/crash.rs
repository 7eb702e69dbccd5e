//! The gateway is killed at the failpoints of gateway and vm driver, over real virtual machines, and started again: the
//! sandbox comes to rest where the last request wanted it, on the same disk, with one VM at most, and nothing is left on the
//! host. gateway/tests/crash.rs does the same over the sim driver, at every time that a failpoint is reached.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use serde_json::Value;
use torpor_tests::{Host, can_run_vms, need, path_variable};

/// What is asked for while the gateway is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verb {
    Create,
    Network,
    Suspend,
    Resume,
    Stop,
    Update,
    Start,
    Delete,
}

use Verb::*;

/// One after the other, each from the phase that the one before leads to.
const LAP: [Verb; 8] = [Create, Network, Suspend, Resume, Stop, Update, Start, Delete];

/// Where the gateway is ended in every `./check`: once in each verb that does something on the host.
const CHOSEN: [&str; 7] = [
    "vm.create.disk",
    "vm.adjust.recorded",
    "vm.stop.flushed",
    "vm.launch.network",
    "vm.release.network",
    "vm.launch.spawned",
    "vm.delete.moved",
];

/// The verbs that reach a failpoint; none: power.rs reaches it.
fn verbs(name: &str) -> &'static [Verb] {
    match name {
        "serve.host_restart" | "reconcile.rest" => &[],
        "reconcile.create" | "reconcile.created" | "service.create" => &[Create],
        "reconcile.start" | "reconcile.lent" | "reconcile.started" => &[Resume, Start, Create],
        "reconcile.stop" | "reconcile.stopped" => &[Suspend, Stop],
        "service.request" | "service.requested" => &[Suspend, Resume, Stop, Start, Delete],
        "reconcile.turn" | "reconcile.write" | "reconcile.written" => &[Suspend, Stop, Resume, Start, Create],
        _ => match name.rsplit_once('.').unwrap().0 {
            "vm.create" => &[Create],
            "vm.launch" | "vm.start" => &[Resume, Start, Create],
            "vm.stop" | "vm.release" => &[Suspend, Stop],
            "vm.adjust" => &[Network],
            "vm.update" | "update" => &[Update],
            "vm.delete" => &[Delete],
            "reconcile" if name.starts_with("reconcile.delete") => &[Delete],
            "store" | "serve" => &[Network, Suspend, Stop, Delete, Update, Resume, Start, Create],
            _ => panic!("'{name}' is new: which verbs reach it?"),
        },
    }
}

/// Every `hit("…")` of the gateway and of the vm driver.
fn all() -> BTreeSet<String> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut names = BTreeSet::new();
    let mut folders = vec![top.join("gateway/src"), top.join("drivers/vm/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(path).unwrap();
                names.extend(
                    text.split("hit(\"")
                        .skip(1)
                        .filter_map(|piece| piece.split('"').next())
                        .map(str::to_owned),
                );
            }
        }
    }
    names
}

/// Which failpoint in which verb of which lap: those that few verbs reach choose first.
fn plan(names: &BTreeSet<String>) -> Vec<BTreeMap<Verb, String>> {
    let mut names: Vec<&String> = names.iter().filter(|name| !verbs(name).is_empty()).collect();
    names.sort_by_key(|name| verbs(name).len());
    let mut laps: Vec<BTreeMap<Verb, String>> = Vec::new();
    for name in names {
        let free =
            |lap: &BTreeMap<Verb, String>| verbs(name).iter().find(|verb| !lap.contains_key(verb)).copied();
        match laps.iter().enumerate().find_map(|(at, lap)| free(lap).map(|verb| (at, verb))) {
            Some((at, verb)) => drop(laps[at].insert(verb, name.clone())),
            None => laps.push([(verbs(name)[0], name.clone())].into()),
        }
    }
    laps
}

/// Processes whose arguments name the sandbox.
fn processes(id: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let arguments = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    arguments
        .filter(|text| {
            let text = String::from_utf8_lossy(text);
            text.contains(id) && text.contains("-name")
        })
        .count()
}

/// The guests that may send anywhere, as the firewall has them.
fn open_to(table: &str) -> String {
    let arguments = ["list", "set", "inet", table, "open"];
    let listed = Command::new("nft").args(arguments).env("PATH", path_variable()).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    String::from_utf8_lossy(&listed.stdout).into_owned()
}

fn gapless(host: &Host, name: &str) {
    let history: Value = serde_json::from_str(&host.ok(&["history", name, "-o", "json"])).unwrap();
    let rows = history.as_array().or_else(|| history["transitions"].as_array()).cloned().unwrap();
    let newest_first = rows.windows(2).all(|pair| pair[0]["from"] == pair[1]["to"]);
    let oldest_first = rows.windows(2).all(|pair| pair[0]["to"] == pair[1]["from"]);
    assert!(rows.len() > 2 && (newest_first || oldest_first), "a gap in {history}");
}

/// Whether the program at hand has failpoints at all.
fn has_failpoints(test: &str, host: &Host) -> bool {
    host.kill_gateway();
    host.start_gateway_with("nothing=error");
    let built_in = host.gateway_log().contains("built with failpoints");
    need(test, "emu", built_in, "torpor was built without --features torpor-cli/failpoints")
}

/// One sandbox and what is known of it.
struct Story<'a> {
    host: &'a Host,
    lap: usize,
    /// Of the sandbox that is, or was.
    id: String,
    /// What the last run had borrowed.
    borrowed: Value,
}

impl Story<'_> {
    /// Not the one of the lap before, nor the default.
    fn policy(&self) -> &'static str {
        if self.lap.is_multiple_of(2) { "none" } else { "open" }
    }

    /// Whether it was acknowledged; if not, what was said.
    fn ask(&self, verb: Verb) -> Result<(), String> {
        let (lap, size) = (format!("LAP={}", self.lap), format!("{}M", 1024 + 64 * (self.lap + 1)));
        let words: &[&str] = match verb {
            Create => &["create", "web", "--no-wait"],
            Network => &["sandbox", "network", "web", "--egress", self.policy()],
            Suspend => &["suspend", "web", "--no-wait"],
            Resume => &["resume", "web", "--no-wait"],
            Stop => &["stop", "web", "--no-wait"],
            Update => &["update", "web", "--env", &lap, "--disk", &size],
            Start => &["start", "web", "--no-wait"],
            Delete => &["delete", "web", "--no-wait", "--allow-missing"],
        };
        let output = self.host.run(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // Cut short after it was begun.
        if verb == Update && said.contains("--resume-pending") {
            let finished = self.host.run(&["update", "--resume-pending", "web"]);
            let said = String::from_utf8_lossy(&finished.stderr).into_owned();
            return finished.status.success().then_some(()).ok_or(said);
        }
        // Of an earlier try.
        let done = output.status.success() || (verb == Create && said.contains("exists already"));
        done.then_some(()).ok_or(said)
    }

    /// None: there is no such sandbox.
    fn phase(&self) -> Option<String> {
        let output = self.host.run(&["get", "web", "-o", "json"]);
        if !output.status.success() {
            assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        let sandbox: Value = serde_json::from_slice(&output.stdout).unwrap();
        sandbox["phase"].as_str().map(str::to_owned)
    }

    /// The phase in which it rests.
    fn rest(&self, what: &str) -> Option<String> {
        let mut last = None;
        self.host.until(&format!("{what}: at rest"), |_| {
            last = self.phase();
            let resting = ["Ready", "Suspended", "Stopped", "Completed", "Error"];
            last.as_ref().is_none_or(|phase| resting.contains(&phase.as_str()))
        });
        last
    }

    /// Asks for it of a gateway that ends at `failpoint`, if there is one, then of one that doesn't, if it has to.
    fn take(&mut self, verb: Verb, failpoint: Option<&String>) {
        let what = format!("{verb:?} {}", failpoint.map_or("", String::as_str));
        let wanted = match verb {
            Create | Network | Resume | Start => Some("Ready"),
            Suspend => Some("Suspended"),
            Stop | Update => Some("Stopped"),
            Delete => None,
        };
        let mut acknowledged = false;
        if let Some(failpoint) = failpoint {
            self.host.kill_gateway();
            if self.host.try_to_start_gateway(&format!("{failpoint}=abort")) {
                acknowledged = self.ask(verb).is_ok();
                self.host.gateway_ends(&what);
            }
            self.host.start_gateway();
            let seen = self.rest(&what);
            assert!(!acknowledged || seen.as_deref() == wanted, "{what}: acknowledged, and is {seen:?}");
        }
        // An update that was acknowledged was done; whatever else was cut short is asked for again.
        if !acknowledged {
            let mut said = self.ask(verb);
            if said.as_ref().is_err_and(|text| text.contains("NOT_IN_FORCE")) {
                // Written; the host is told a moment later.
                self.host.until(&what, |_| self.ask(verb).is_ok());
                said = Ok(());
            }
            assert_eq!(said, Ok(()), "{what}: asked again\n{}", self.host.gateway_log());
        }
        let seen = self.rest(&what);
        assert_eq!(seen.as_deref(), wanted, "{what}\n{}", self.host.gateway_log());
        self.look(verb, &what);
    }

    fn look(&mut self, verb: Verb, what: &str) {
        let host = self.host;
        match verb {
            Create => {
                let sandbox = host.get("web");
                self.id = sandbox["id"].as_str().unwrap().to_owned();
                if std::env::var_os("TORPOR_BOX").is_some() {
                    assert!(sandbox["machine"].as_str().unwrap().starts_with("kvm"), "{sandbox}");
                }
                host.sh("web", &format!("echo {} > /root/lap", self.lap));
            }
            Network => {
                let sandbox = host.get("web");
                assert_eq!(sandbox["egress"]["policy"], self.policy(), "{what}");
                let ip = sandbox["host"]["ip"].as_str().unwrap();
                let is_open = open_to(&format!("torpor_{}", host.instance())).contains(ip);
                assert_eq!(is_open, self.policy() == "open", "{what}: the firewall has another policy");
            }
            Resume | Start => {
                assert_eq!(
                    host.sh("web", "cat /root/lap"),
                    format!("{}\n", self.lap),
                    "{what}: another disk"
                );
            }
            Update => assert_eq!(host.get("web")["environment"]["LAP"], self.lap.to_string(), "{what}"),
            Suspend | Stop | Delete => {}
        }
        let runs = matches!(verb, Create | Network | Resume | Start);
        if runs {
            self.borrowed = host.get("web")["host"].clone();
        } else {
            assert_eq!(host.leftovers(&self.id, &self.borrowed), Vec::<String>::new(), "{what}");
        }
        assert_eq!(processes(&self.id), usize::from(runs), "{what}: VMs of one sandbox");
        if verb == Start {
            gapless(host, "web");
        }
        if verb == Delete {
            let sandboxes = fs::read_dir(host.dir().join("state/sandboxes")).unwrap().flatten();
            let left: Vec<_> = sandboxes.map(|entry| entry.file_name()).collect();
            assert!(left.is_empty(), "{what}: {left:?}");
        }
    }
}

fn through(host: &Host, names: &BTreeSet<String>) {
    let laps = plan(names);
    let mut kills = 0;
    for (lap, ends) in laps.iter().enumerate() {
        let mut story = Story { host, lap, id: String::new(), borrowed: Value::Null };
        for verb in LAP {
            story.take(verb, ends.get(&verb));
        }
        kills += ends.len();
    }
    println!("{kills} kills in {} laps", laps.len());
}

fn host(test: &str) -> Option<Host> {
    let host = can_run_vms(test).then(|| Host::with("enable_sandbox_updates = true"))?;
    has_failpoints(test, &host).then_some(host)
}

#[test]
fn a_gateway_killed_in_the_middle_of_verbs_over_virtual_machines_goes_on() {
    if let Some(host) = host("a_gateway_killed_in_the_middle_of_verbs_over_virtual_machines_goes_on") {
        through(&host, &CHOSEN.map(str::to_owned).into());
    }
}

#[test]
#[ignore = "slow: every failpoint of the gateway and of the vm driver"]
fn a_gateway_killed_at_any_failpoint_over_virtual_machines_goes_on() {
    if let Some(host) = host("a_gateway_killed_at_any_failpoint_over_virtual_machines_goes_on") {
        through(&host, &all());
    }
}

#[test]
fn every_failpoint_has_its_place_in_a_lap() {
    let (names, laps) = (all(), plan(&all()));
    assert!(names.len() > 50, "{names:?}");
    let planned: BTreeSet<&String> = laps.iter().flat_map(BTreeMap::values).collect();
    let left: Vec<&String> = names.iter().filter(|name| !planned.contains(name)).collect();
    assert_eq!(left, ["reconcile.rest", "serve.host_restart"]);
    assert_eq!(plan(&CHOSEN.map(str::to_owned).into()).len(), 1);
}
