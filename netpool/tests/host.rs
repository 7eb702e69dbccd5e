//! What breaks sandboxes on a host: it is found, mended with real packets as the judge, and taken back.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::fs;
use std::path::PathBuf;

use common::{OUTSIDE, PATIENCE, SILENCE, World, arrival, frame, ready, sh, udp_socket};
use torpor_netpool::PoolConfig;
use torpor_netpool::linux::{Check, Finding, Fix, applied, apply_fix, diagnose, undo_fixes};

fn findings(world: &World, check: Check) -> Vec<Finding> {
    let config = world.config.clone();
    let all = world.host.run(move || diagnose(&config));
    all.into_iter().filter(|finding| finding.check == check).collect()
}

#[test]
fn a_foreign_forward_drop_is_named_mended_and_restored() {
    if !ready("a_foreign_forward_drop_is_named_mended_and_restored") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let base = "type filter hook forward priority 0; policy drop;";
    for (name, rules, chain) in [
        ("policy", format!("table ip filter {{ chain FORWARD {{ {base} }}; }}"), "FORWARD"),
        (
            "docker",
            format!(
                "table ip filter {{ chain DOCKER-USER {{ counter return; }}; chain FORWARD {{ {base} jump DOCKER-USER; \
                 iifname docker0 accept; }}; }}"
            ),
            "DOCKER-USER",
        ),
        (
            "firewalld",
            "table inet firewalld { chain filter_FORWARD { type filter hook forward priority 10; policy accept; \
             ct state established,related accept; iifname lo accept; reject with icmpx admin-prohibited; }; }"
                .to_string(),
            "filter_FORWARD",
        ),
    ] {
        let world = World::new();
        let server = udp_socket(&world.outside, "198.51.100.2:7");
        let mut guest = world.guest(0);
        assert_eq!(findings(&world, Check::ForeignForward), [], "{name}: nothing is in the way yet");
        world.host.run(move || sh(&format!("nft '{rules}'")));
        let before = world.host.run(|| sh("nft -s list ruleset"));
        guest.send_udp(OUTSIDE, 7, "closed");
        assert_eq!(arrival(&server, "closed", SILENCE), None, "{name}");

        let found = findings(&world, Check::ForeignForward);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        assert!(found[0].message.contains("FORWARD"), "{}", found[0].message);
        let fix = found[0].fix.clone().unwrap();
        assert!(matches!(&fix, Fix::Accept { chain: found, .. } if found == chain), "{fix}");
        let record = folder.path().join(name);
        let (given, file) = (fix.clone(), record.clone());
        world.host.run(move || {
            apply_fix(&given, &file).unwrap();
            apply_fix(&given, &file).unwrap();
        });
        assert_eq!(world.host.run(|| sh("nft list ruleset")).matches("torpor tpr-").count(), 2, "{name}: once");
        assert_eq!(findings(&world, Check::ForeignForward), [], "{name}");
        guest.send_udp(OUTSIDE, 7, "open");
        let sender = arrival(&server, "open", PATIENCE).expect("the fix lets packets out");
        server.send_to(b"answer", sender).unwrap();
        assert!(guest.hears("answer", PATIENCE), "{name}: and in");

        let file = record.clone();
        let undone = world.host.run(move || undo_fixes(&file).unwrap());
        assert!(undone.len() == 1 && undone[0].result.is_ok(), "{undone:?}");
        assert!(!record.exists());
        assert_eq!(world.host.run(|| sh("nft -s list ruleset")), before, "{name}: as it was");
        // From another port: the kernel still remembers the connection that was let through.
        let from = (guest.net.mac, guest.net.guest_ip);
        guest.send(&frame::udp4(from, (guest.gateway, OUTSIDE), (4001, 7), b"closed again"));
        assert_eq!(arrival(&server, "closed again", SILENCE), None, "{name}");
    }
}

#[test]
fn settings_of_the_kernel_are_found_mended_and_restored() {
    if !ready("settings_of_the_kernel_are_found_mended_and_restored") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("fixes.json");
    let mut world = World::new();
    assert_eq!(findings(&world, Check::Forwarding), []);
    world.host.run(|| sh("echo 0 > /proc/sys/net/ipv4/ip_forward"));
    let fix = findings(&world, Check::Forwarding).remove(0).fix.unwrap();
    // Two uplinks: sandboxes leave by one, the default route is by the other.
    world.config.uplink = Some("up0".to_string());
    world.host.run(|| {
        sh("ip link add vpn0 type veth peer name vpn1; ip addr add 192.0.2.1/24 dev vpn0; ip link set vpn0 up; ip link set vpn1 up");
        sh("ip route replace default via 192.0.2.2; echo 1 > /proc/sys/net/ipv4/conf/up0/rp_filter");
    });
    let strict = findings(&world, Check::ReturnPath).remove(0);
    assert!(strict.message.contains("up0") && strict.message.contains("vpn0"), "{}", strict.message);
    let (fixes, file) = ([fix, strict.fix.unwrap()], record.clone());
    world.host.run(move || fixes.iter().for_each(|fix| apply_fix(fix, &file).unwrap()));
    assert_eq!(applied(&record).unwrap().len(), 2);
    let values =
        || sh("cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/conf/up0/rp_filter").replace('\n', " ");
    assert_eq!(world.host.run(values), "1 2 ");
    assert!(findings(&world, Check::Forwarding).is_empty() && findings(&world, Check::ReturnPath).is_empty());
    let file = record.clone();
    world.host.run(move || undo_fixes(&file).unwrap());
    assert_eq!(world.host.run(values), "0 1 ");

    // What somebody has changed since is left alone; a chain or an interface that is gone is no reason to fail for ever.
    let fix = Fix::Sysctl { path: "/proc/sys/net/ipv4/conf/up0/rp_filter".into(), value: "2".to_string() };
    let gone = Fix::Accept {
        family: "ip".to_string(),
        table: "nothere".to_string(),
        chain: "FORWARD".to_string(),
        tap_prefix: "tpr-".to_string(),
    };
    let file = record.clone();
    let results = world.host.run(move || {
        apply_fix(&fix, &file).unwrap();
        sh("nft 'add table ip nothere; add chain ip nothere FORWARD'");
        apply_fix(&gone, &file).unwrap();
        sh("nft delete table ip nothere; echo 0 > /proc/sys/net/ipv4/conf/up0/rp_filter");
        undo_fixes(&file).unwrap()
    });
    assert!(results.iter().all(|undone| undone.result.is_ok()), "{results:?}");
    assert_eq!(world.host.run(values), "0 0 ");
}

#[test]
fn an_uplink_that_is_missing_is_named() {
    if !ready("an_uplink_that_is_missing_is_named") {
        return;
    }
    let mut world = World::new();
    assert_eq!(findings(&world, Check::Uplink), []);
    world.config.uplink = Some("none0".to_string());
    assert!(findings(&world, Check::Uplink).remove(0).message.contains("none0"));
    world.config = PoolConfig::default();
    world.host.run(|| sh("ip route del default"));
    assert!(findings(&world, Check::Uplink).remove(0).message.contains("no default route"));
    world.config.dns_port = Some(5300);
    world.host.run(|| {
        sh("nft 'table inet filter { chain input { type filter hook input priority 0; policy drop; }; }'")
    });
    let found = findings(&world, Check::ForeignInput).remove(0);
    assert!(found.message.contains("names") && found.fix.is_some(), "{found:?}");
}

#[test]
fn a_damaged_record_is_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let record: PathBuf = folder.path().join("fixes.json");
    assert_eq!(undo_fixes(&record).unwrap().len(), 0, "nothing was ever fixed");
    fs::write(&record, "[{").unwrap();
    let error = undo_fixes(&record).unwrap_err().to_string();
    assert!(error.contains("fixes.json"), "{error}");
    assert!(record.exists());
}
