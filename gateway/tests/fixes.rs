//! `torpor doctor --fix` and `--undo`, in a network namespace of the test's own.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    process::{Command, Stdio},
};

use torpor_gateway::{Config, fixes};

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

fn nft(script: &str) -> String {
    let mut command = Command::new("nft");
    let path = "/usr/sbin:/sbin:/usr/bin:/bin";
    let out = command.env("PATH", path).args(script.split(' ')).stderr(Stdio::inherit()).output().unwrap();
    assert!(out.status.success(), "nft {script}");
    String::from_utf8(out.stdout).unwrap()
}

fn may(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    let tools = ["/usr/sbin/nft", "/sbin/nft"].iter().any(|path| fs::metadata(path).is_ok());
    let required = std::env::var("REQUIRE").unwrap_or_default();
    for (word, met) in [("root", root), ("tools", tools)] {
        if !met {
            assert!(!required.split(',').any(|need| need == word), "{test} needs {word}");
            let _ =
                std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: no {word}\n"));
            return false;
        }
    }
    true
}

#[test]
fn the_smallest_changes_are_recorded_made_once_and_taken_back() {
    if !may("the_smallest_changes_are_recorded_made_once_and_taken_back") {
        return;
    }
    // Ends with its thread, and all that was changed in it.
    let work = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (state, pool) = (folder.path().join("state"), Config::default().network);
        fs::write(FORWARDING, "0").unwrap();
        nft("add table ip filter");
        nft("add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }");
        let rules = || nft("list chain ip filter FORWARD");
        let before = rules();

        let changed = fixes::fix(&state, &pool).unwrap();
        let shown: Vec<&str> = changed.iter().map(|changed| changed.change.as_str()).collect();
        assert!(changed.iter().all(|changed| changed.done && changed.problem.is_none()), "{changed:?}");
        assert!(shown.iter().any(|text| text.contains("ip_forward")), "{shown:?}");
        assert!(shown.iter().any(|text| text.contains("chain FORWARD")), "{shown:?}");
        assert_eq!(fs::read_to_string(FORWARDING).unwrap().trim(), "1");
        assert_eq!(rules().matches("tpr-*").count(), 2, "{}", rules());
        assert_eq!(fixes::recorded(&state).unwrap(), shown);

        assert_eq!(fixes::fix(&state, &pool).unwrap(), [], "a second time there is nothing to do");
        let undone = fixes::undo(&state).unwrap();
        assert!(undone.len() == shown.len() && undone.iter().all(|undone| undone.done), "{undone:?}");
        assert_eq!(fs::read_to_string(FORWARDING).unwrap().trim(), "0");
        assert_eq!(rules(), before);
        assert!(fixes::recorded(&state).unwrap().is_empty() && fixes::undo(&state).unwrap().is_empty());

        // A record that can't be read is told, and nothing is changed without one.
        fs::write(state.join("host-changes.json"), "[{").unwrap();
        for error in [fixes::fix(&state, &pool).unwrap_err(), fixes::undo(&state).unwrap_err()] {
            assert!(error.to_string().contains("host-changes.json"), "{error}");
        }
        assert_eq!(fs::read_to_string(FORWARDING).unwrap().trim(), "0");
    };
    std::thread::spawn(work).join().unwrap();
}
