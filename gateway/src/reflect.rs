//! gRPC reflection: what is served, told to clients that know no .proto file. Both versions of the protocol, which differ in
//! the name of their package alone; older clients (grpcio's, evans, grpcurl before 1.9) ask for v1alpha.
//!
//! Not tonic's own: that one ends the stream at the first name that it doesn't know, where the protocol has an answer for
//! it, and questions that came after it were lost.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{Stream, StreamExt as _};
use http::Uri;
use prost::Message;
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto};
use tonic::{Code, Request, Response, Status, Streaming, body::Body, server::NamedService};
use tonic_reflection::pb::{
    self,
    v1::{
        ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse,
        ServerReflectionRequest, ServerReflectionResponse, ServiceResponse,
        server_reflection_request::MessageRequest,
        server_reflection_response::MessageResponse,
        server_reflection_server::{ServerReflection, ServerReflectionServer},
    },
};
use torpor_sandbox::id::clip;
use tower::Service;

/// The interface of guests, which agents serve and the gateway does not.
const NOT_SERVED: &str = "torpor.agent";
/// The one method, as it is called.
const LATEST: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// A FileDescriptorSet whose files are left as they are: options that prost doesn't know would be lost.
#[derive(Clone, PartialEq, Message)]
struct Files {
    #[prost(bytes = "vec", repeated, tag = "1")]
    file: Vec<Vec<u8>>,
}

/// Where everything is declared.
#[derive(Debug, Default)]
struct Index {
    services: Vec<String>,
    files: HashMap<String, Arc<[u8]>>,
    symbols: HashMap<String, Arc<[u8]>>,
    /// By what they extend, and their number.
    extensions: BTreeMap<(String, i32), Arc<[u8]>>,
}

fn within(scope: &str, name: &str) -> String {
    if scope.is_empty() { name.to_owned() } else { format!("{scope}.{name}") }
}

/// Full names are written with a dot before them in descriptors, and by some clients.
fn bare(name: &str) -> &str {
    name.strip_prefix('.').unwrap_or(name)
}

impl Index {
    fn add(&mut self, set: &[u8]) -> Result<(), prost::DecodeError> {
        for raw in Files::decode(set)?.file {
            let file = FileDescriptorProto::decode(raw.as_slice())?;
            if file.package() == NOT_SERVED || file.package().starts_with(&format!("{NOT_SERVED}.")) {
                continue;
            }
            let raw = Arc::from(raw);
            if self.files.insert(file.name().to_owned(), Arc::clone(&raw)).is_none() {
                self.add_file(&file, &raw);
            }
        }
        Ok(())
    }

    fn add_file(&mut self, file: &FileDescriptorProto, raw: &Arc<[u8]>) {
        let scope = file.package();
        file.message_type.iter().for_each(|message| self.add_message(scope, message, raw));
        file.enum_type.iter().for_each(|one| self.add_enum(scope, one, raw));
        file.extension.iter().for_each(|one| self.add_extension(scope, one, raw));
        for service in &file.service {
            let name = within(scope, service.name());
            service.method.iter().for_each(|method| self.declare(&name, method.name(), raw));
            self.declare(scope, service.name(), raw);
            self.services.push(name);
        }
    }

    fn declare(&mut self, scope: &str, name: &str, raw: &Arc<[u8]>) {
        self.symbols.insert(within(scope, name), raw.clone());
    }

    fn add_message(&mut self, scope: &str, message: &DescriptorProto, raw: &Arc<[u8]>) {
        self.declare(scope, message.name(), raw);
        let scope = within(scope, message.name());
        message.field.iter().for_each(|field| self.declare(&scope, field.name(), raw));
        message.oneof_decl.iter().for_each(|oneof| self.declare(&scope, oneof.name(), raw));
        message.nested_type.iter().for_each(|nested| self.add_message(&scope, nested, raw));
        message.enum_type.iter().for_each(|one| self.add_enum(&scope, one, raw));
        message.extension.iter().for_each(|one| self.add_extension(&scope, one, raw));
    }

    /// Its values stand beside it, not in it.
    fn add_enum(&mut self, scope: &str, one: &EnumDescriptorProto, raw: &Arc<[u8]>) {
        self.declare(scope, one.name(), raw);
        one.value.iter().for_each(|value| self.declare(scope, value.name(), raw));
    }

    fn add_extension(&mut self, scope: &str, one: &FieldDescriptorProto, raw: &Arc<[u8]>) {
        self.declare(scope, one.name(), raw);
        self.extensions.insert((bare(one.extendee()).to_owned(), one.number()), raw.clone());
    }

    fn answer(&self, asked: MessageRequest) -> MessageResponse {
        let file = |found: Option<&Arc<[u8]>>, what: String| match found {
            Some(file) => MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
                file_descriptor_proto: vec![file.to_vec()],
            }),
            None => error(Code::NotFound, format!("there is no {what}")),
        };
        match asked {
            MessageRequest::ListServices(_) => {
                let service = self.services.iter().map(|name| ServiceResponse { name: name.clone() });
                MessageResponse::ListServicesResponse(ListServiceResponse { service: service.collect() })
            }
            MessageRequest::FileByFilename(name) => {
                file(self.files.get(&name), format!("file '{}'", clip(&name)))
            }
            MessageRequest::FileContainingSymbol(name) => {
                file(self.symbols.get(bare(&name)), format!("'{}'", clip(&name)))
            }
            MessageRequest::FileContainingExtension(asked) => {
                let (of, number) = (bare(&asked.containing_type).to_owned(), asked.extension_number);
                let what = format!("extension {number} of '{}'", clip(&of));
                file(self.extensions.get(&(of, number)), what)
            }
            MessageRequest::AllExtensionNumbersOfType(of) => {
                let base_type_name = bare(&of).to_owned();
                if !self.symbols.contains_key(&base_type_name) {
                    return error(Code::NotFound, format!("there is no '{}'", clip(&of)));
                }
                let all = self.extensions.keys().filter(|(extended, _)| *extended == base_type_name);
                let extension_number = all.map(|(_, number)| *number).collect();
                MessageResponse::AllExtensionNumbersResponse(ExtensionNumberResponse {
                    base_type_name,
                    extension_number,
                })
            }
        }
    }
}

fn error(code: Code, error_message: String) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse { error_code: code.into(), error_message })
}

/// Answers what is asked.
#[derive(Clone, Debug)]
pub struct Reflection(Arc<Index>);

type Answers = Pin<Box<dyn Stream<Item = Result<ServerReflectionResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ServerReflection for Reflection {
    type ServerReflectionInfoStream = Answers;

    async fn server_reflection_info(
        &self,
        request: Request<Streaming<ServerReflectionRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let index = self.0.clone();
        let answers = request.into_inner().map(move |asked| {
            let asked = asked?;
            let nothing = || error(Code::InvalidArgument, "nothing that is known here was asked".to_owned());
            let answer = asked.message_request.clone().map_or_else(nothing, |one| index.answer(one));
            Ok(ServerReflectionResponse {
                valid_host: asked.host.clone(),
                original_request: Some(asked),
                message_response: Some(answer),
            })
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// The current version.
pub type Latest = ServerReflectionServer<Reflection>;

/// The same service by its older name.
#[derive(Clone, Debug)]
pub struct Alpha(Latest);

impl NamedService for Alpha {
    const NAME: &'static str = "grpc.reflection.v1alpha.ServerReflection";
}

impl Service<http::Request<Body>> for Alpha {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = <Latest as Service<http::Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<http::Request<Body>>::poll_ready(&mut self.0, context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // Its one method; others don't come past the table of methods.
        *request.uri_mut() = Uri::from_static(LATEST);
        self.0.call(request)
    }
}

/// Both, of the services of a FileDescriptorSet, of health and of reflection itself.
///
/// # Errors
/// Descriptors that can't be read.
pub fn services(descriptors: &[u8]) -> Result<(Latest, Alpha), prost::DecodeError> {
    let mut index = Index::default();
    index.add(descriptors)?;
    index.add(tonic_health::pb::FILE_DESCRIPTOR_SET)?;
    index.add(pb::v1::FILE_DESCRIPTOR_SET)?;
    index.add(pb::v1alpha::FILE_DESCRIPTOR_SET)?;
    index.services.sort();
    let latest = Latest::new(Reflection(Arc::new(index)));
    Ok((latest.clone(), Alpha(latest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> Index {
        let mut index = Index::default();
        index.add(torpor_proto::DESCRIPTORS).unwrap();
        index
    }

    fn file_of(answer: &MessageResponse) -> FileDescriptorProto {
        let MessageResponse::FileDescriptorResponse(found) = answer else { panic!("{answer:?}") };
        FileDescriptorProto::decode(found.file_descriptor_proto[0].as_slice()).unwrap()
    }

    #[test]
    fn symbols_of_every_kind_are_found_and_what_agents_serve_is_not() {
        let index = index();
        let symbol = |name: &str| index.answer(MessageRequest::FileContainingSymbol(name.into()));
        for name in [
            "torpor.v1.Sandboxes",
            ".torpor.v1.Sandboxes.Get",
            "torpor.v1.Sandbox",
            "torpor.v1.Sandbox.name",
            "torpor.v1.DeleteSandboxResponse.Outcome",
            "torpor.v1.Phase",
            "torpor.v1.PHASE_READY",
        ] {
            assert_eq!(file_of(&symbol(name)).package(), "torpor.v1", "{name}");
        }
        for name in ["torpor.agent.v1.Agent", "torpor.v1.Nope", "", "."] {
            let MessageResponse::ErrorResponse(error) = symbol(name) else { panic!("{name}") };
            assert_eq!(error.error_code, i32::from(Code::NotFound), "{name}");
        }
        assert!(index.services.iter().all(|name| !name.starts_with(NOT_SERVED)));
    }

    #[test]
    fn extensions_are_found_by_what_they_extend() {
        let index = index();
        let of = "google.protobuf.MethodOptions";
        let all = index.answer(MessageRequest::AllExtensionNumbersOfType(of.into()));
        let MessageResponse::AllExtensionNumbersResponse(all) = all else { panic!("{all:?}") };
        assert!(all.extension_number.contains(&72_295_728), "google.api.http: {all:?}");
        let asked = pb::v1::ExtensionRequest { containing_type: of.into(), extension_number: 72_295_728 };
        let answer = index.answer(MessageRequest::FileContainingExtension(asked));
        assert_eq!(file_of(&answer).name(), "google/api/annotations.proto");
    }
}
