//! Endpoints of sandboxes, between wire types and ours.

use torpor_proto::v1::{self, endpoint_status::Result as Wire};
use torpor_sandbox::Endpoint;

use super::convert::time;
use crate::{endpoints::Finding, error::ApiError, service::View};

pub fn wanted(endpoints: Vec<v1::Endpoint>) -> Result<Vec<Endpoint>, ApiError> {
    let one = |endpoint: v1::Endpoint| {
        let port = u16::try_from(endpoint.port).ok().filter(|port| *port > 0).ok_or_else(|| {
            let name = endpoint.name.escape_debug();
            ApiError::invalid("endpoints", format!("'{name}': {} is not a port", endpoint.port))
        })?;
        let http_path = Some(endpoint.http_path).filter(|path| !path.is_empty());
        Ok(Endpoint { name: endpoint.name, port, http_path })
    };
    endpoints.into_iter().map(one).collect()
}

pub fn shown(endpoint: &Endpoint) -> v1::Endpoint {
    v1::Endpoint {
        name: endpoint.name.clone(),
        port: endpoint.port.into(),
        http_path: endpoint.http_path.clone().unwrap_or_default(),
    }
}

pub fn statuses(view: &View) -> Vec<v1::EndpointStatus> {
    let declared = view.record.spec.endpoints.iter();
    let status = |(endpoint, seen): (&Endpoint, &Option<crate::endpoints::Observation>)| {
        let (name, port) = (endpoint.name.clone(), endpoint.port.into());
        let Some(seen) = seen else {
            return v1::EndpointStatus { name, port, ..v1::EndpointStatus::default() };
        };
        let (result, http_status, message) = found(&seen.finding);
        let (observed, since) = (time(seen.observed), time(seen.since));
        v1::EndpointStatus { name, port, result: result.into(), http_status, message, observed, since }
    };
    declared.zip(&view.endpoints).map(status).collect()
}

fn found(finding: &Finding) -> (Wire, u32, String) {
    let none = String::new;
    match finding {
        Finding::Ok { status } => (Wire::Ok, status.unwrap_or_default().into(), none()),
        Finding::Refused(message) => (Wire::Refused, 0, message.clone()),
        Finding::Timeout => (Wire::Timeout, 0, "no answer within 3 seconds".to_owned()),
        Finding::Reset => (Wire::Reset, 0, "the connection broke before an answer".to_owned()),
        Finding::BadHttp => (Wire::BadHttp, 0, "what it answered is no HTTP".to_owned()),
        Finding::HttpError(status) => (Wire::HttpError, (*status).into(), none()),
        Finding::Unknown(message) => (Wire::Unknown, 0, message.clone()),
    }
}
