package kubeapi

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"slices"
	"time"

	apixv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apixclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/typed/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
)

// eventCRD lets the ordinary event recorder work on a server without core types.
//
//go:embed event.yaml
var eventCRD []byte

// leaseCRD lets several controllers elect one of them on a server without core types.
//
//go:embed lease.yaml
var leaseCRD []byte

// digestAnnotation holds the digest of a definition, to compare the server's definition with this binary's.
const digestAnnotation = "drover.io/definition-digest"

// InstallCRDs installs the definitions of Drover's kinds on the server behind cfg, and waits until the server serves
// the kinds. InstallCRDs adds the definitions of events and leases only on an embedded server. In a Kubernetes cluster
// InstallCRDs fails while objects of the former group exist.
func InstallCRDs(ctx context.Context, cfg *rest.Config) error {
	cs, err := clientset.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("definitions: %w", err)
	}
	wanted, err := readDefinitions()
	if err != nil {
		return err
	}
	// Only a Kubernetes cluster has pods. (For this call a server without core types is no error.)
	core, err := cs.Discovery().ServerResourcesForGroupVersion("v1")
	if err != nil {
		return fmt.Errorf("definitions: %w", err)
	}
	embedded := true
	if slices.ContainsFunc(core.APIResources, func(r metav1.APIResource) bool { return r.Name == "pods" }) {
		embedded, wanted = false, wanted[builtIn:]
		if err := refuseFormerObjects(ctx, cfg, wanted); err != nil {
			return err
		}
	}
	crds := cs.ApiextensionsV1().CustomResourceDefinitions()
	names := map[string]bool{}
	for i := range wanted {
		if err := applyDefinition(ctx, crds, &wanted[i]); err != nil {
			return fmt.Errorf("definition %s: %w", wanted[i].Name, err)
		}
		names[wanted[i].Name] = true
	}
	err = awaitEstablished(ctx, crds, names)
	for tries := 1; apierrors.IsInternalError(err) && tries < 10; tries++ { // a broken watch is an internal error
		err = awaitEstablished(ctx, crds, names)
	}
	if err != nil {
		return fmt.Errorf("definitions: %w", err)
	}
	if embedded {
		for i := range wanted {
			if err := backdateDefinition(ctx, crds, wanted[i].Name); err != nil {
				return fmt.Errorf("definition %s: %w", wanted[i].Name, err)
			}
		}
	}
	for i := range wanted {
		if err := awaitDiscovery(ctx, cs.Discovery(), &wanted[i]); err != nil {
			return fmt.Errorf("definition %s: %w", wanted[i].Name, err)
		}
	}
	return nil
}

// youngest is the age of a definition below which the server delays each creation of such an object for as long,
// because other servers may not know the definition yet: crdHandler of k8s.io/apiextensions-apiserver.
const youngest = 2 * time.Second

// backdateDefinition makes a definition look older, so that the server does not delay creations: an embedded server is
// the only one.
func backdateDefinition(ctx context.Context, crds apixclient.CustomResourceDefinitionInterface, name string) error {
	for {
		crd, err := crds.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		young := false
		for i := range crd.Status.Conditions {
			c := &crd.Status.Conditions[i]
			if c.Type == apixv1.Established && time.Since(c.LastTransitionTime.Time) < youngest+time.Second {
				c.LastTransitionTime, young = metav1.NewTime(time.Now().Add(-youngest-time.Second)), true
			}
		}
		if !young {
			return nil
		}
		if _, err = crds.UpdateStatus(ctx, crd, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// awaitDiscovery returns when clients can discover the kind. The server lists a kind a moment after establishing the
// definition, without an event.
func awaitDiscovery(ctx context.Context, d discovery.DiscoveryInterface, crd *apixv1.CustomResourceDefinition) error {
	gv := crd.Spec.Group + "/" + crd.Spec.Versions[0].Name
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		list, err := d.ServerResourcesForGroupVersion(gv)
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		if err == nil {
			for _, r := range list.APIResources {
				if r.Name == crd.Spec.Names.Plural {
					return nil
				}
			}
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// builtIn is the number of definitions that replace built-in kinds of a Kubernetes cluster.
const builtIn = 2

// readDefinitions returns the definitions of this binary, first the replacements of built-in kinds.
func readDefinitions() ([]apixv1.CustomResourceDefinition, error) {
	files := [][]byte{eventCRD, leaseCRD}
	err := fs.WalkDir(api.CRDs, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := api.CRDs.ReadFile(path)
		files = append(files, b)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("definitions: %w", err)
	}
	out := make([]apixv1.CustomResourceDefinition, len(files))
	for i, b := range files {
		if err := yaml.UnmarshalStrict(b, &out[i]); err != nil {
			return nil, fmt.Errorf("definition: %w", err)
		}
		sum := sha256.Sum256(b)
		metav1.SetMetaDataAnnotation(&out[i].ObjectMeta, digestAnnotation, hex.EncodeToString(sum[:8]))
	}
	return out, nil
}

func applyDefinition(ctx context.Context, crds apixclient.CustomResourceDefinitionInterface,
	want *apixv1.CustomResourceDefinition) error {
	for {
		_, err := crds.Create(ctx, want, metav1.CreateOptions{})
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		have, err := crds.Get(ctx, want.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		if have.Annotations[digestAnnotation] == want.Annotations[digestAnnotation] {
			return nil
		}
		want.ResourceVersion = have.ResourceVersion
		_, err = crds.Update(ctx, want, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			return err
		}
		want.ResourceVersion = ""
	}
}

// awaitEstablished returns when the server serves all names.
func awaitEstablished(ctx context.Context, crds apixclient.CustomResourceDefinitionInterface,
	names map[string]bool) error {
	list, err := crds.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if isEstablished(&list.Items[i]) {
			delete(names, list.Items[i].Name)
		}
	}
	w, err := crds.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		return err
	}
	defer w.Stop()
	for len(names) > 0 {
		select {
		case ev, ok := <-w.ResultChan():
			if !ok {
				return awaitEstablished(ctx, crds, names)
			}
			crd, ok := ev.Object.(*apixv1.CustomResourceDefinition)
			if !ok {
				return apierrors.FromObject(ev.Object)
			}
			if !names[crd.Name] {
				continue
			}
			if isEstablished(crd) {
				delete(names, crd.Name)
			}
			for _, c := range crd.Status.Conditions {
				if c.Type == apixv1.NamesAccepted && c.Status == apixv1.ConditionFalse {
					return api.Errorf(api.Exists, "%s: %s", crd.Name, c.Message)
				}
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func isEstablished(crd *apixv1.CustomResourceDefinition) bool {
	for _, c := range crd.Status.Conditions {
		if c.Type == apixv1.Established {
			return c.Status == apixv1.ConditionTrue
		}
	}
	return false
}
