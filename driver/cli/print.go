package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

func (a *app) checkOutput() error {
	switch a.output {
	case "table", "json", "yaml", "name":
		return nil
	}
	return usagef("-o %s is not known: use table, json, yaml or name", a.output)
}

// printObject writes an object: as json, yaml or name if -o asks for these forms, else by human.
func (a *app) printObject(w io.Writer, obj client.Object, human func(io.Writer)) error {
	switch a.output {
	case "table":
		human(w)
		return nil
	case "name":
		_, err := fmt.Fprintln(w, typedName(obj))
		return err
	}
	if err := prepareObject(obj); err != nil {
		return err
	}
	return a.encodeValue(w, obj)
}

// printList is printObject for a list. printList calls row for each object in order.
func (a *app) printList(w io.Writer, list client.ObjectList, header string, row func(runtime.Object) []string) error {
	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	switch a.output {
	case "name":
		for _, o := range items {
			if _, err := fmt.Fprintln(w, typedName(o.(client.Object))); err != nil {
				return err
			}
		}
		return nil
	case "table":
		rows := make([][]string, 0, len(items))
		for _, o := range items {
			rows = append(rows, row(o))
		}
		return text.Table(w, header, rows)
	}
	for _, o := range items {
		if err := prepareObject(o.(client.Object)); err != nil {
			return err
		}
	}
	if err := meta.SetList(list, items); err != nil {
		return err
	}
	gvk, err := apiutil.GVKForObject(list, scheme)
	if err != nil {
		return err
	}
	list.GetObjectKind().SetGroupVersionKind(gvk)
	return a.encodeValue(w, list)
}

// encodeValue writes v as json or yaml. For several names a command calls encodeValue once per document.
func (a *app) encodeValue(w io.Writer, v any) error {
	if a.output == "yaml" {
		out, err := yaml.Marshal(v)
		if err != nil {
			return err
		}
		if a.encoded {
			out = append([]byte("---\n"), out...)
		}
		a.encoded = true
		_, err = w.Write(out)
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// prepareObject sets an object's kind, which typed clients omit, and removes the managed fields.
func prepareObject(obj client.Object) error {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return err
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	obj.SetManagedFields(nil)
	return nil
}

func typedName(obj client.Object) string {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return obj.GetName()
	}
	return strings.ToLower(gvk.Kind) + "." + gvk.Group + "/" + obj.GetName()
}

// outcome is the result for an object that is deleted or not shown.
type outcome struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Node   string `json:"node,omitempty"` // of a disk
	Result string `json:"result"`
}

// printOutcome reports a finished command in the form of -o; the kind is a key of kinds.
func (a *app) printOutcome(cmd *cobra.Command, kind, name, what string) {
	w := cmd.OutOrStdout()
	switch a.output {
	case "name":
		fmt.Fprintf(w, "%s.%s/%s\n", strings.ReplaceAll(kind, " ", ""), api.GroupVersion.Group, name)
	case "table":
		fmt.Fprintf(w, "%s %q %s\n", strings.TrimPrefix(strings.TrimPrefix(kind, "backing"), "backup "), name, what)
	default:
		_ = a.encodeValue(w, outcome{Kind: kinds[kind], Name: name, Result: what}) // a struct of strings always encodes
	}
}

// printDiskOutcome reports a finished command on a disk, named as other commands accept the name.
func (a *app) printDiskOutcome(cmd *cobra.Command, node, path, what string) {
	w := cmd.OutOrStdout()
	switch a.output {
	case "name":
		fmt.Fprintf(w, "%s:%s\n", node, path)
	case "table":
		fmt.Fprintf(w, "disk %q %s\n", path, what)
	default:
		_ = a.encodeValue(w, outcome{Kind: "Disk", Name: path, Node: node, Result: what})
	}
}

// kinds maps the kinds in people's words to API kinds.
var kinds = map[string]string{"volume": "Volume", "backingimage": "BackingImage", "snapshot": "Snapshot",
	"snapshot group": "SnapshotGroup", "node": "Node", "backup target": "BackupTarget", "backup": "Backup"}

func printConditions(w io.Writer, conds []metav1.Condition) {
	if len(conds) == 0 {
		return
	}
	fmt.Fprintln(w, "\nConditions:")
	rows := make([][]string, 0, len(conds))
	for _, c := range conds {
		rows = append(rows, []string{c.Type, string(c.Status), c.Reason, age(c.LastTransitionTime), c.Message})
	}
	_ = text.Table(w, "TYPE STATUS REASON SINCE MESSAGE", rows)
}

// joinLabels formats labels for people, in the order of their names.
func joinLabels(labels map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, k+"="+labels[k])
	}
	return strings.Join(all, ", ")
}

func age(t metav1.Time) string {
	if t.IsZero() {
		return ""
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// ageOfText is age for a time as RFC 3339; a text that is none gives nothing.
func ageOfText(text string) string {
	at, _ := time.Parse(time.RFC3339, text)
	return age(metav1.NewTime(at))
}

// someBytes formats a size for people, and an unknown size (0) as nothing.
func someBytes(n int64) string {
	if n == 0 {
		return ""
	}
	return api.SizeText(n)
}

// seconds formats a duration for people.
func seconds(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return d.Round(100 * time.Millisecond).String()
}
