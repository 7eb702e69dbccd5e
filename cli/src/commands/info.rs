//! `torpor info`

use torpor_sdk::v1;

use super::{Outcome, disk::host_line};
use crate::{
    output::{
        table::{bytes, fields},
        view,
    },
    session::Session,
};

/// Prints what the gateway is and what it has left.
pub async fn run(session: &Session) -> Outcome {
    let info = session.connect().await?.info().await?;
    session.print(&view::Info::from(&info), || vec![info.gateway_id.clone()], || human(session, &info))?;
    Ok(0)
}

fn human(session: &Session, info: &v1::InfoResponse) -> String {
    let mut out = fields([
        ("Gateway", format!("{} at {}", info.version, session.endpoint)),
        ("Client", env!("CARGO_PKG_VERSION").to_owned()),
        ("Id", info.gateway_id.clone()),
        ("Started", info.started.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("State", info.state_dir.clone()),
        ("Run", info.run_dir.clone()),
        ("Default image", info.default_image.clone()),
        ("Default driver", info.default_driver.clone()),
    ]);
    for driver in &info.drivers {
        let memory = if driver.keeps_memory { "keeps memory" } else { "keeps no memory" };
        out.push_str(&fields([
            ("Driver", format!("{} {} ({memory})", driver.name, driver.version)),
            ("  machine", driver.machine.clone()),
            ("  notice", driver.notice.clone()),
        ]));
    }
    if let Some(disk) = &info.disk {
        out.push_str(&fields([("Disk", host_line(disk))]));
    }
    if let Some(c) = &info.capacity {
        let slots =
            format!("{} of {} slots used, {} set aside", c.slots_used, c.slots_total, c.slots_quarantined);
        let total = bytes(c.memory_total_bytes);
        let cpus = match c.resources.iter().find(|resource| resource.name == "cpus") {
            Some(cpus) => format!("{}, {} of {} lent", c.cpus_total, cpus.used, cpus.capacity),
            None => c.cpus_total.to_string(),
        };
        out.push_str(&fields([
            ("Sandboxes", c.sandboxes.to_string()),
            ("Network", slots),
            ("Memory", format!("{} of {total} lent", torpor_sandbox::spec::size(c.memory_used_bytes))),
            ("CPUs", cpus),
        ]));
    }
    out
}
