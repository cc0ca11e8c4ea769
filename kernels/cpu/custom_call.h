// The operators as custom calls of XLA: any of them, by the text that describes the call.
//
//   vllm_neuron_cpu.linear bfloat16[8,576] bfloat16[1536,576] None -> bfloat16[8,1536]
//
// The operator, its arguments and its results, with one space between them. XLA says where the tensors lie; all are
// row-major. Numbers and None stand for themselves.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace custom_call {

struct Form {
  at::ScalarType type;
  std::vector<int64_t> shape;

  at::Tensor at(void* address) const { return at::from_blob(address, shape, at::TensorOptions(type)); }
};

struct Call {
  c10::OperatorHandle op;
  std::vector<std::pair<std::optional<Form>, c10::IValue>> arguments;  // the form of a tensor, or a value
  std::vector<Form> results;
};

inline at::ScalarType type_named(const std::string& name) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kFloat8_e4m3fn, at::kInt, at::kLong, at::kBool})
    if (c10::getDtypeNames(type).first == name) return type;
  TORCH_CHECK(false, "no dtype ", name);
}

// "float32[2,3]"
inline Form form(const std::string& word) {
  const size_t bracket = word.find('[');
  Form form{type_named(word.substr(0, bracket)), {}};
  std::istringstream sizes(word.substr(bracket + 1, word.size() - bracket - 2));
  for (std::string size; std::getline(sizes, size, ',');) form.shape.push_back(std::stoll(size));
  return form;
}

inline Call parse(const std::string& text) {
  std::istringstream words(text);
  std::string word;
  words >> word;
  word.replace(word.find('.'), 1, "::");
  Call call{c10::Dispatcher::singleton().findSchemaOrThrow(word.c_str(), ""), {}, {}};
  const auto& declared = call.op.schema().arguments();
  while (words >> word && word != "->") {
    TORCH_CHECK(call.arguments.size() < declared.size(), "too many arguments: ", text);
    auto type = declared[call.arguments.size()].type();
    if (const auto optional = type->cast<c10::OptionalType>(); optional && word != "None") type = optional->getElementType();
    if (word.back() == ']')
      call.arguments.emplace_back(form(word), c10::IValue());
    else if (word == "None")
      call.arguments.emplace_back(std::nullopt, c10::IValue());
    else if (type->kind() == c10::TypeKind::FloatType)
      call.arguments.emplace_back(std::nullopt, std::stod(word));
    else
      call.arguments.emplace_back(std::nullopt, int64_t(std::stoll(word)));
  }
  while (words >> word) call.results.push_back(form(word));
  return call;
}

// Calls by their texts. They stay: there are as many as kinds of calls in the graphs of a model.
inline const Call& call_of(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Call> calls;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = calls.find(text);
  return found != calls.end() ? found->second : calls.emplace(text, parse(text)).first->second;
}

inline void run(void* results, const void* const* operands, const std::string& text) {
  const at::AutoDispatchBelowAutograd guard;
  const Call& call = call_of(text);
  std::vector<c10::IValue> stack;
  for (const auto& [form, value] : call.arguments)
    stack.push_back(form ? c10::IValue(form->at(const_cast<void*>(*operands++))) : value);
  call.op.callBoxed(&stack);
  TORCH_CHECK(stack.size() == call.results.size(), text, " returned ", stack.size(), " tensors");
  for (size_t i = 0; i < stack.size(); i++) {
    const at::Tensor from = stack[i].toTensor().contiguous();
    TORCH_CHECK(from.sizes() == call.results[i].shape && from.scalar_type() == call.results[i].type, text);
    // A single result is at the address itself, several are at the addresses that lie there.
    void* to = stack.size() == 1 ? results : static_cast<void**>(results)[i];
    std::memcpy(to, from.const_data_ptr(), from.nbytes());
  }
}

// What went wrong first since it was last asked: an exception cannot pass through XLA.
class Failure {
 public:
  static Failure& get() {
    static Failure failure;
    return failure;
  }

  void set(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text_.empty()) text_ = text;
  }

  std::string take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(text_, {});
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

inline std::string take_failure() { return Failure::get().take(); }

}  // namespace custom_call

// XLA's form of a function that is called by name, API version 3; the status stays untouched.
extern "C" __attribute__((visibility("default"))) void vllm_neuron_cpu_call(void* results, const void** operands,
                                                                            const char* text, size_t length, void*) {
  try {
    custom_call::run(results, operands, std::string(text, length));
  } catch (const c10::Error& error) {
    custom_call::Failure::get().set(error.what_without_backtrace());
  } catch (const std::exception& error) {
    custom_call::Failure::get().set(error.what());
  }
}
