package kubeapi

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// withCore adds the schemas of Secrets and events for `kubectl apply` and `kubectl explain` to the generated schemas.
func withCore(generated common.GetOpenAPIDefinitions) common.GetOpenAPIDefinitions {
	text := func(format, description string) spec.Schema {
		return spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"string"}, Format: format, Description: description}}
	}
	anyKey := func(value spec.Schema, description string) spec.Schema {
		return spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"object"}, Description: description,
			AdditionalProperties: &spec.SchemaOrBool{Allows: true, Schema: &value}}}
	}
	object := func(properties map[string]spec.Schema, needs ...string) common.OpenAPIDefinition {
		properties["kind"], properties["apiVersion"] = text("", ""), text("", "")
		return common.OpenAPIDefinition{Dependencies: needs,
			Schema: spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"object"}, Properties: properties}}}
	}
	return func(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
		to := func(model string) spec.Schema { return spec.Schema{SchemaProps: spec.SchemaProps{Ref: ref(model)}} }
		meta, listMeta := metav1.ObjectMeta{}.OpenAPIModelName(), metav1.ListMeta{}.OpenAPIModelName()
		one, many := corev1.Secret{}.OpenAPIModelName(), corev1.SecretList{}.OpenAPIModelName()
		item := to(one)
		defs := generated(ref)
		defs[one] = object(map[string]spec.Schema{
			"metadata":   to(meta),
			"type":       text("", "The purpose of the secret; Opaque unless set. The type cannot change."),
			"data":       anyKey(text("byte", ""), "The content, in base64."),
			"stringData": anyKey(text("", ""), "Content as plain text: for writing alone, it becomes data."),
			"immutable": {SchemaProps: spec.SchemaProps{Type: []string{"boolean"},
				Description: "If true, neither the content nor this can change."}},
		}, meta)
		defs[many] = object(map[string]spec.Schema{
			"metadata": to(listMeta),
			"items":    {SchemaProps: spec.SchemaProps{Type: []string{"array"}, Items: &spec.SchemaOrArray{Schema: &item}}},
		}, listMeta, one)
		one, many = corev1.Event{}.OpenAPIModelName(), corev1.EventList{}.OpenAPIModelName()
		about := spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"object"}, Description: "The object of the " +
			"event."}}
		whole := spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"integer"}, Format: "int32",
			Description: "The number of occurrences."}}
		occurred := to(one)
		defs[one] = object(map[string]spec.Schema{
			"metadata": to(meta), "involvedObject": about, "count": whole,
			"type":           text("", "Normal or Warning."),
			"reason":         text("", "The reason, in one word."),
			"message":        text("", "The event, for people."),
			"firstTimestamp": text("date-time", "The time of the first occurrence."),
			"lastTimestamp":  text("date-time", "The time of the last occurrence."),
		}, meta)
		defs[many] = object(map[string]spec.Schema{
			"metadata": to(listMeta),
			"items":    {SchemaProps: spec.SchemaProps{Type: []string{"array"}, Items: &spec.SchemaOrArray{Schema: &occurred}}},
		}, listMeta, one)
		return defs
	}
}
