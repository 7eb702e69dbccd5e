//! What is said in HTTP that isn't gRPC: REST and gRPC-Web over the same services, and exposed ports by host name.

mod hosts;

use std::{convert::Infallible, sync::Arc};

use http::{Request, Response};
use tonic::body::Body;
use torpor_rest::{Admit, Options, Rest, RestError};
use tower::{Layer as _, ServiceExt as _, util::BoxCloneSyncService};

use self::hosts::Hosts;
use crate::{
    access::{Access, Peer},
    api::to_status,
    config::HttpConfig,
    service::Service,
};

/// The package with REST.
const PACKAGE: &str = "torpor.v1";

/// All that a listener serves.
pub type Front = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// Puts REST, gRPC-Web and exposed ports before the gRPC services.
///
/// # Errors
/// An API whose descriptors don't fit together.
pub fn front<S>(
    grpc: S,
    access: Arc<Access>,
    service: &Arc<Service>,
    config: &HttpConfig,
) -> Result<Front, RestError>
where
    S: tower::Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let options = Options {
        package: PACKAGE.to_owned(),
        title: "Torpor".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        origins: config.origins.clone(),
    };
    let admit: Admit = Arc::new(move |path, headers, extensions| {
        let access = access.clone();
        Box::pin(async move {
            let peer = extensions.get::<Peer>().cloned();
            access.admits(&path, &headers, peer.as_ref()).await.map_err(to_status)
        })
    });
    let api = Rest::guarded(torpor_proto::DESCRIPTORS, options, Some(admit))?.layer().layer(grpc);
    if config.expose_domain.is_empty() {
        return Ok(BoxCloneSyncService::new(api));
    }
    let hosts = Arc::new(Hosts::new(service, &config.expose_domain));
    let by_host = tower::service_fn(move |request: Request<Body>| {
        let (api, hosts) = (api.clone(), hosts.clone());
        async move {
            match hosts.port_of(&request) {
                Some(wanted) => Ok(hosts.answer(&wanted, request).await),
                None => api.oneshot(request).await,
            }
        }
    });
    Ok(BoxCloneSyncService::new(by_host))
}
