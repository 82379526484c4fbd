package host

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	originhttp "drover.io/drover/imagestore/origin/http"
	"drover.io/drover/imagestore/origin/registry"
	"drover.io/drover/imagestore/origin/upload"
)

// settingPrivate lets sources be on addresses inside the network.
const settingPrivate = "allow-private-image-sources"

// importImage is one import from the image's source. address is where an upload was expected before, or empty. With mend, the
// image is repaired below the replicas that use it.
func (n *copyReconciler) importImage(ctx context.Context, j *transfer, slot func(context.Context) error, spec *api.BackingImageSpec,
	on block.Layers, want importer.Spec, address string, mend bool) (got importer.Result, err error) {
	if spec.SourceType == api.SourceClone {
		return n.copyClone(ctx, j, slot, spec, on, want, mend)
	}
	whole := want
	if mend {
		want = importer.RepairSpec(whole)
	}
	var up *upload.Upload
	open := func(ctx context.Context) (*origin.Stream, error) {
		if spec.SourceType == api.SourceUpload {
			if want.Checkpoint != nil {
				up = n.uploads.Continue(want.Checkpoint.Mark)
				n.log.Info("upload can be continued", "bytes", want.Checkpoint.Mark.Off, "of", want.Checkpoint.Mark.Size)
			} else {
				size, _ := strconv.ParseInt(spec.SourceParameters["size"], 10, 64)
				up = n.uploads.Expect(size, address)
			}
			j.setState(api.ImageStarting, up.URL)
			s, err := up.Accept(ctx)
			if err != nil {
				return nil, err
			}
			if err := slot(ctx); err != nil {
				_ = s.Close()
				return nil, err
			}
			j.setState(api.ImageInProgress, up.URL) // what is cut is continued there
			return s, nil
		}
		if err := slot(ctx); err != nil {
			return nil, err
		}
		j.setState(api.ImageStarting, "")
		s, err := n.openOrigin(ctx, spec, want.Checkpoint)
		if err == nil {
			j.setState(api.ImageInProgress, "")
		}
		return s, err
	}
	want.CheckpointEvery = n.opts.CheckpointEvery
	switch spec.SourceType {
	case api.SourceDownload, api.SourceUpload, api.SourceRegistry:
		want.Checkpoint = importer.FindCheckpoint(ctx, on, want)
	}
	if mend {
		return importer.RepairFromOrigin(ctx, on, whole, want, &j.progress, open)
	}
	got, err = importer.Import(ctx, on, want, &j.progress, open)
	if spec.SourceType == api.SourceUpload && err != nil && !errors.Is(err, context.Canceled) {
		err = errors.Join(err, importer.Remove(ctx, on, want)) // nobody will be asked for the rest
	}
	if up != nil {
		up.Finish(err)
	}
	return got, err
}

// openOrigin opens the source; a download where kept (or nil) ends, if the server still has the same.
func (n *copyReconciler) openOrigin(ctx context.Context, spec *api.BackingImageSpec, kept *importer.Checkpoint) (*origin.Stream, error) {
	url := spec.SourceParameters["url"]
	switch spec.SourceType {
	case api.SourceFile:
		return origin.OpenFile(spec.SourceParameters["path"])
	case api.SourceDownload:
		o := n.opts.Download
		secret, err := n.readSecret(ctx, spec.SecretRef)
		if err == nil {
			o.Access, err = accessOf(secret)
		}
		if err != nil {
			return nil, explainSecret(spec.SecretRef, err)
		}
		if o.Allow, err = n.allowedAddresses(ctx); err != nil {
			return nil, err
		}
		o.Resumed = func(off int64, cause error) {
			n.log.Warn("download was cut, asking for the rest", "bytes", off, "cause", cause)
		}
		if kept != nil {
			o.From = kept.Mark
		}
		s, err := originhttp.Open(ctx, url, o)
		if kept != nil && origin.Changed(err) {
			n.log.Warn("download cannot be continued, it begins anew", "bytes", kept.Mark.Off, "cause", err)
			kept.Drop()
			o.From = origin.Mark{}
			s, err = originhttp.Open(ctx, url, o)
		} else if kept != nil && err == nil {
			n.log.Info("download continues", "bytes", kept.Mark.Off, "of", kept.Mark.Size)
		}
		return s, err
	case api.SourceRegistry:
		d := n.opts.Download
		o := registry.Options{Start: d.Start, Stall: d.Stall, Pause: d.Pause, Resumes: d.Resumes,
			PlainHTTP: spec.SourceParameters["plainHTTP"] == "true"}
		secret, err := n.readSecret(ctx, spec.SecretRef)
		if err == nil {
			err = applyAccount(&o, url, secret)
		}
		if err != nil {
			return nil, explainSecret(spec.SecretRef, err)
		}
		if o.Allow, err = n.allowedAddresses(ctx); err != nil {
			return nil, err
		}
		o.Resumed = func(off int64, cause error) {
			n.log.Warn("transfer from a registry was cut, asking for the rest", "bytes", off, "cause", cause)
		}
		o.Resolved = func(digest string) { n.log.Info("image found in its registry", "url", url, "digest", digest) }
		if kept != nil {
			o.From = registry.From{Mark: kept.Mark, State: kept.State}
		}
		s, err := registry.Open(ctx, url, o)
		if kept != nil && origin.Changed(err) {
			n.log.Warn("transfer from a registry cannot be continued, it begins anew", "bytes", kept.Mark.Off, "cause", err)
			kept.Drop()
			o.From = registry.From{}
			s, err = registry.Open(ctx, url, o)
		} else if kept != nil && err == nil {
			n.log.Info("transfer from a registry continues", "bytes", kept.Mark.Off, "of", kept.Mark.Size)
		}
		return s, err
	}
	return nil, api.Errorf(api.Unsupported, "source type %s is not supported yet", spec.SourceType)
}

// allowedAddresses says which addresses outside the public internet a source may be on; nil: none.
func (n *copyReconciler) allowedAddresses(ctx context.Context) (func(netip.Addr) bool, error) {
	var s api.Setting
	err := n.Get(ctx, client.ObjectKey{Name: settingPrivate}, &s)
	if client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "read setting %s", settingPrivate)
	}
	if err != nil {
		s.Value = api.Settings[settingPrivate]
	}
	if s.Value != "true" {
		return nil, nil
	}
	return func(netip.Addr) bool { return true }, nil
}

// readSecret reads what an image's Secret holds; nil where it has none.
func (n *copyReconciler) readSecret(ctx context.Context, ref *api.SecretRef) (map[string][]byte, error) {
	if ref == nil {
		return nil, nil
	}
	var s corev1.Secret
	err := n.live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &s)
	if client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "it cannot be read")
	}
	if err != nil {
		return nil, api.Errorf(api.NotFound, "it does not exist: create it, the image is then tried again")
	}
	return s.Data, nil
}

// explainSecret names the Secret. What is wrong with it can be made right, so no such error is for good.
func explainSecret(ref *api.SecretRef, err error) error {
	kind := api.KindOf(err)
	if ref == nil {
		return err
	}
	if kind == api.Invalid {
		kind = api.Denied
	}
	return api.Errorf(kind, "Secret %s in namespace %s: %w", ref.Name, ref.Namespace, err)
}

// accessOf is what a Secret says about a download.
func accessOf(secret map[string][]byte) (originhttp.Access, error) {
	// Tools that make a Secret of a file often leave a line's end in it.
	line := func(key string) string { return strings.TrimRight(string(secret[key]), "\r\n") }
	a := originhttp.Access{Username: line(api.SecretUsername), Password: line(api.SecretPassword),
		Token: line(api.SecretToken), CA: secret[api.SecretCA], Header: http.Header{}}
	for key := range secret {
		if name, ok := strings.CutPrefix(key, api.SecretHeader); ok {
			a.Header.Set(name, line(key))
		}
	}
	if secret != nil && a.Username == "" && a.Password == "" && a.Token == "" && len(a.CA)+len(a.Header) == 0 {
		return a, api.Errorf(api.Invalid, "it holds none of %s, %s, %s, %s and %s<name>", api.SecretUsername,
			api.SecretPassword, api.SecretToken, api.SecretCA, api.SecretHeader)
	}
	return a, a.Check()
}

// applyAccount puts what a Secret says about the registry of url into o.
func applyAccount(o *registry.Options, url string, secret map[string][]byte) error {
	if secret == nil {
		return nil
	}
	a, err := accessOf(map[string][]byte{api.SecretUsername: secret[api.SecretUsername],
		api.SecretPassword: secret[api.SecretPassword], api.SecretCA: secret[api.SecretCA]})
	config := secret[api.SecretDocker]
	switch {
	case a.Username != "" && a.Password != "" && err == nil:
		o.Username, o.Password = a.Username, a.Password
	case config != nil:
		if o.Username, o.Password, err = registry.Login(config, url); err != nil {
			return err
		}
	case len(a.CA) == 0:
		return api.Errorf(api.Invalid, "it holds none of %s with %s, %s, and %s", api.SecretUsername, api.SecretPassword,
			api.SecretDocker, api.SecretCA)
	case err != nil:
		return err
	}
	o.CA = a.CA
	return nil
}
