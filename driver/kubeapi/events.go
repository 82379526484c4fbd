package kubeapi

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/watch"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
)

// eventView is the kind Event of the core group, read-only. The server stores events as events.k8s.io, but `kubectl
// describe` and `kubectl events` read the older kind.
type eventView struct {
	client eventsclient.EventsV1Interface
}

var (
	_ rest.Scoper               = eventView{}
	_ rest.SingularNameProvider = eventView{}
	_ rest.ShortNamesProvider   = eventView{}
	_ rest.Lister               = eventView{}
	_ rest.Getter               = eventView{}
	_ rest.Watcher              = eventView{}
)

func (eventView) New() runtime.Object     { return &corev1.Event{} }
func (eventView) NewList() runtime.Object { return &corev1.EventList{} }
func (eventView) Destroy()                {}
func (eventView) NamespaceScoped() bool   { return true }
func (eventView) GetSingularName() string { return "event" }
func (eventView) ShortNames() []string    { return []string{"ev"} }

func (v eventView) Get(ctx context.Context, name string, o *metav1.GetOptions) (runtime.Object, error) {
	e, err := v.client.Events(genericapirequest.NamespaceValue(ctx)).Get(ctx, name, *o)
	if err != nil {
		return nil, err
	}
	return coreEvent(e), nil
}

func (v eventView) List(ctx context.Context, o *internalversion.ListOptions) (runtime.Object, error) {
	opts, match, err := storedEventOptions(o)
	if err != nil {
		return nil, err
	}
	list, err := v.client.Events(genericapirequest.NamespaceValue(ctx)).List(ctx, opts)
	if err != nil {
		return nil, err
	}
	out := &corev1.EventList{ListMeta: list.ListMeta, Items: []corev1.Event{}}
	for i := range list.Items {
		if e := coreEvent(&list.Items[i]); match(e) {
			out.Items = append(out.Items, *e)
		}
	}
	return out, nil
}

func (v eventView) Watch(ctx context.Context, o *internalversion.ListOptions) (watch.Interface, error) {
	opts, match, err := storedEventOptions(o)
	if err != nil {
		return nil, err
	}
	w, err := v.client.Events(genericapirequest.NamespaceValue(ctx)).Watch(ctx, opts)
	if err != nil {
		return nil, err
	}
	return watch.Filter(w, func(in watch.Event) (watch.Event, bool) {
		is, ok := in.Object.(*eventsv1.Event)
		if !ok {
			return in, true // a status ends the watch
		}
		e := coreEvent(is)
		in.Object = e
		return in, in.Type == watch.Bookmark || match(e)
	}), nil
}

// storedEventOptions returns the options for the stored events, and a filter: stored events have other field names, so
// the filter matches the field selector.
func storedEventOptions(o *internalversion.ListOptions) (metav1.ListOptions, func(*corev1.Event) bool, error) {
	var opts metav1.ListOptions
	if o == nil {
		return opts, func(*corev1.Event) bool { return true }, nil
	}
	asked := o.FieldSelector
	o = o.DeepCopy()
	o.FieldSelector = nil
	err := internalversion.Convert_internalversion_ListOptions_To_v1_ListOptions(o, &opts, nil)
	return opts, func(e *corev1.Event) bool {
		return asked == nil || asked.Empty() || asked.Matches(eventFields(e))
	}, err
}

// eventFields returns the selectable fields of an event, as in a cluster.
func eventFields(e *corev1.Event) fields.Set {
	of := e.InvolvedObject
	return fields.Set{
		"metadata.name": e.Name, "metadata.namespace": e.Namespace,
		"involvedObject.kind": of.Kind, "involvedObject.namespace": of.Namespace, "involvedObject.name": of.Name,
		"involvedObject.uid": string(of.UID), "involvedObject.apiVersion": of.APIVersion,
		"involvedObject.resourceVersion": of.ResourceVersion, "involvedObject.fieldPath": of.FieldPath,
		"reason": e.Reason, "reportingComponent": e.ReportingController, "source": e.Source.Component, "type": e.Type,
	}
}

// addEvents registers the kind and its fields in a scheme.
func addEvents(sch *runtime.Scheme, v1 schema.GroupVersion) error {
	for _, gv := range []schema.GroupVersion{v1, {Version: runtime.APIVersionInternal}} {
		sch.AddKnownTypes(gv, &corev1.Event{}, &corev1.EventList{})
	}
	return sch.AddFieldLabelConversionFunc(v1.WithKind("Event"), func(label, value string) (string, string, error) {
		if _, ok := eventFields(&corev1.Event{})[label]; !ok {
			return "", "", fmt.Errorf("events cannot be selected by the field %q", label)
		}
		return label, value, nil
	})
}

// coreEvent converts an event to the older kind.
func coreEvent(e *eventsv1.Event) *corev1.Event {
	out := &corev1.Event{ObjectMeta: e.ObjectMeta, InvolvedObject: e.Regarding, Related: e.Related, Reason: e.Reason,
		Message: e.Note, Type: e.Type, Action: e.Action, EventTime: e.EventTime,
		ReportingController: e.ReportingController, ReportingInstance: e.ReportingInstance,
		Source: e.DeprecatedSource, FirstTimestamp: e.DeprecatedFirstTimestamp, LastTimestamp: e.DeprecatedLastTimestamp,
		Count: max(e.DeprecatedCount, 1)}
	if out.Source.Component == "" {
		out.Source.Component = e.ReportingController
	}
	if out.FirstTimestamp.IsZero() {
		if out.FirstTimestamp = metav1.NewTime(e.EventTime.Time); e.EventTime.IsZero() {
			out.FirstTimestamp = e.CreationTimestamp
		}
	}
	if out.LastTimestamp.IsZero() {
		out.LastTimestamp = out.FirstTimestamp
	}
	if s := e.Series; s != nil {
		out.Series = &corev1.EventSeries{Count: s.Count, LastObservedTime: s.LastObservedTime}
		out.Count, out.LastTimestamp = s.Count, metav1.NewTime(s.LastObservedTime.Time)
	}
	return out
}

// ConvertToTable gives `kubectl get events` the columns of a cluster.
func (eventView) ConvertToTable(_ context.Context, obj, _ runtime.Object) (*metav1.Table, error) {
	table := &metav1.Table{ColumnDefinitions: []metav1.TableColumnDefinition{
		{Name: "Last Seen", Type: "string"}, {Name: "Type", Type: "string"}, {Name: "Reason", Type: "string"},
		{Name: "Object", Type: "string"}, {Name: "Message", Type: "string"},
		{Name: "Source", Type: "string", Priority: 1}, {Name: "Count", Type: "integer", Priority: 1},
		{Name: "Name", Type: "string", Format: "name", Priority: 1},
	}}
	add := func(e *corev1.Event) {
		table.Rows = append(table.Rows, metav1.TableRow{Object: runtime.RawExtension{Object: e}, Cells: []any{
			duration.HumanDuration(time.Since(e.LastTimestamp.Time)), e.Type, e.Reason,
			strings.ToLower(e.InvolvedObject.Kind) + "/" + e.InvolvedObject.Name, e.Message, e.Source.Component, e.Count,
			e.Name}})
	}
	switch o := obj.(type) {
	case *corev1.Event:
		table.ResourceVersion = o.ResourceVersion
		add(o)
	case *corev1.EventList:
		table.ResourceVersion, table.Continue = o.ResourceVersion, o.Continue
		table.RemainingItemCount = o.RemainingItemCount
		for i := range o.Items {
			add(&o.Items[i])
		}
	default:
		return nil, fmt.Errorf("%T is no event", obj)
	}
	return table, nil
}
