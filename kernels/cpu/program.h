// Calls of operators that run one after the other without Python between them: a step takes hundreds of calls of a few
// microseconds each, and the interpreter would take as long again for them, with its lock held.
//
// Values lie in numbered places: first what `run` is given, then what the calls return, in their order.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace program {

// What lies in a place, or one item of the list that lies there.
struct Place : torch::CustomClassHolder {
  Place(int64_t index, std::optional<int64_t> item) : index(index), item(item) {}

  c10::IValue in(const std::vector<c10::IValue>& places) const {
    return item ? places[index].toListRef()[*item] : places[index];
  }

  const int64_t index;
  const std::optional<int64_t> item;
};

using PlaceRef = c10::intrusive_ptr<Place>;

// The place that an argument names, or none if it is a value itself.
inline PlaceRef place_of(const c10::IValue& argument) {
  static const auto type = c10::getCustomClassType<PlaceRef>();
  return argument.isObject() && argument.type()->isSubtypeOf(*type) ? argument.toCustomClass<Place>() : PlaceRef();
}

// A list of the type that an operator declares, of what lies in places and of values.
inline c10::IValue list_of(const c10::Type& declared, const std::vector<c10::IValue>& items,
                           const std::vector<c10::IValue>& places) {
  const auto& element = declared.expectRef<c10::ListType>().getElementType();
  c10::impl::GenericList list(element);
  for (const auto& item : items) {
    const auto place = place_of(item);
    list.push_back(place ? place->in(places) : item);
  }
  return list;
}

class Program : public torch::CustomClassHolder {
 public:
  // Adds a call.
  //   name, overload: of an operator.
  //   arguments: a tuple with a Place, a value or a tuple of them for each argument that the operator declares.
  //   dropped: places that nothing uses after it.
  void call(const std::string& name, const std::string& overload, const c10::IValue& arguments,
            std::vector<int64_t> dropped) {
    Call call{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, std::move(dropped)};
    const auto& declared = call.op.schema().arguments();
    const auto& given = arguments.toTupleRef().elements();
    TORCH_CHECK(given.size() == declared.size(), name, " takes ", declared.size(), " arguments, not ", given.size());
    for (size_t i = 0; i < given.size(); i++) {
      auto type = declared[i].type();  // with numbers where symbols are allowed
      if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      call.arguments.push_back(argument(given[i], type));
    }
    calls_.push_back(std::move(call));
  }

  // What lies in the places `results` after all calls.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& given, const std::vector<PlaceRef>& results) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<c10::IValue> places(given.begin(), given.end()), stack;
    for (const auto& call : calls_) {
      for (const auto& argument : call.arguments) stack.push_back(argument.in(places));
      call.op.callBoxed(&stack);
      std::move(stack.begin(), stack.end(), std::back_inserter(places));
      stack.clear();
      for (const int64_t place : call.dropped) places[place] = c10::IValue();
    }
    std::vector<at::Tensor> found;
    for (const auto& place : results) found.push_back(place->in(places).toTensor());
    return found;
  }

 private:
  // A place, a value, or the items of a list some of which are places.
  struct Argument {
    PlaceRef place;
    c10::IValue value;
    c10::TypePtr list;
    std::vector<c10::IValue> items;

    c10::IValue in(const std::vector<c10::IValue>& places) const {
      return place ? place->in(places) : list ? list_of(*list, items, places) : value;
    }
  };

  struct Call {
    c10::OperatorHandle op;
    std::vector<Argument> arguments;
    std::vector<int64_t> dropped;
  };

  static Argument argument(const c10::IValue& given, const c10::TypePtr& declared) {
    if (given.isTuple()) {
      std::vector<c10::IValue> items(given.toTupleRef().elements());
      if (std::any_of(items.begin(), items.end(), place_of)) return {{}, {}, declared, std::move(items)};
      return {{}, list_of(*declared, items, {}), {}, {}};
    }
    if (given.isInt() && declared->kind() == c10::TypeKind::FloatType) return {{}, double(given.toInt()), {}, {}};
    if (given.isScalar() && declared->kind() == c10::TypeKind::TensorType) {
      at::Tensor number = at::scalar_to_tensor(given.toScalar());
      number.unsafeGetTensorImpl()->set_wrapped_number(true);  // so that it does not decide the type of a result
      return {{}, std::move(number), {}, {}};
    }
    return {place_of(given), given, {}, {}};
  }

  std::vector<Call> calls_;
};

}  // namespace program
