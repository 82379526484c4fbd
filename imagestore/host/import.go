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

// settingPrivate allows origins at addresses inside the network.
const settingPrivate = "allow-private-image-sources"

// imageImport is one import from the image's origin.
type imageImport struct {
	*copyReconciler
	t       *transfer
	slot    slotFunc
	image   *api.BackingImageSpec
	on      block.Layers
	spec    importer.Spec
	address string // where an earlier process expected the upload, or empty

	upload *upload.Upload // set once the import expects an upload
}

// importImage imports the image.
func (m *imageImport) importImage(ctx context.Context) (importer.Result, error) {
	m.findCheckpoint(ctx)
	got, err := importer.Import(ctx, m.on, m.spec, &m.t.progress, m.openWithSlot)
	if m.image.SourceType == api.SourceUpload && err != nil && !errors.Is(err, context.Canceled) {
		err = errors.Join(err, importer.Remove(ctx, m.on, m.spec)) // the rest of an upload cannot be requested
	}
	if m.upload != nil {
		m.upload.Finish(err)
	}
	return got, err
}

// repairCopy imports the image a second time and repairs the damaged copy from the new data, below the replicas that
// use the copy.
func (m *imageImport) repairCopy(ctx context.Context) (importer.Result, error) {
	damaged := m.spec
	m.spec = importer.RepairSpec(damaged)
	m.findCheckpoint(ctx)
	return importer.RepairFromOrigin(ctx, m.on, damaged, m.spec, &m.t.progress,
		func(ctx context.Context) (importer.Result, error) {
			return importer.Import(ctx, m.on, m.spec, &m.t.progress, m.openWithSlot)
		})
}

// findCheckpoint finds the checkpoint of an origin that can continue.
func (m *imageImport) findCheckpoint(ctx context.Context) {
	m.spec.CheckpointEvery = m.opts.CheckpointEvery
	switch m.image.SourceType {
	case api.SourceDownload, api.SourceUpload, api.SourceRegistry:
		m.spec.Checkpoint = importer.FindCheckpoint(ctx, m.on, m.spec)
	}
}

// openWithSlot opens the origin and waits for a slot of the node. An upload that no sender has started takes no slot.
func (m *imageImport) openWithSlot(ctx context.Context) (*origin.Stream, error) {
	if m.image.SourceType == api.SourceUpload {
		return m.openUpload(ctx)
	}
	if err := m.slot(ctx); err != nil {
		return nil, err
	}
	m.t.setState(api.ImageStarting, "")
	s, err := m.openOrigin(ctx)
	if err == nil {
		m.t.setState(api.ImageInProgress, "")
	}
	return s, err
}

// openOrigin opens a file, a download or an image of a registry.
func (m *imageImport) openOrigin(ctx context.Context) (*origin.Stream, error) {
	switch m.image.SourceType {
	case api.SourceFile:
		return origin.OpenFile(m.image.SourceParameters["path"])
	case api.SourceDownload:
		return m.openDownload(ctx)
	case api.SourceRegistry:
		return m.openRegistry(ctx)
	}
	return nil, api.Errorf(api.Unsupported, "source type %s is not supported yet", m.image.SourceType)
}

// openUpload expects the upload and waits for its sender.
func (m *imageImport) openUpload(ctx context.Context) (*origin.Stream, error) {
	if k := m.spec.Checkpoint; k != nil {
		m.upload = m.uploads.Continue(k.Mark)
		m.log.Info("upload can be continued", "bytes", k.Mark.Off, "of", k.Mark.Size)
	} else {
		size, _ := strconv.ParseInt(m.image.SourceParameters["size"], 10, 64)
		m.upload = m.uploads.Expect(size, m.address)
	}
	m.t.setState(api.ImageStarting, m.upload.URL)
	s, err := m.upload.Accept(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.slot(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}
	m.t.setState(api.ImageInProgress, m.upload.URL) // the sender continues there after a cut
	return s, nil
}

// openDownload opens the download, at the checkpoint if the server still has the same content.
func (m *imageImport) openDownload(ctx context.Context) (*origin.Stream, error) {
	o := m.opts.Download
	secret, err := m.readSecret(ctx, m.image.SecretRef)
	if err == nil {
		o.Access, err = accessOf(secret)
	}
	if err != nil {
		return nil, explainSecret(m.image.SecretRef, err)
	}
	if o.Allow, err = m.allowedAddresses(ctx); err != nil {
		return nil, err
	}
	o.Resumed = m.logCut("download")
	url := m.image.SourceParameters["url"]
	return m.openResumable("download", func(k *importer.Checkpoint) (*origin.Stream, error) {
		o.From = origin.Mark{}
		if k != nil {
			o.From = k.Mark
		}
		return originhttp.Open(ctx, url, o)
	})
}

// openRegistry opens the disk of a registry's image, at the checkpoint if the registry still has the same image.
func (m *imageImport) openRegistry(ctx context.Context) (*origin.Stream, error) {
	d, url := m.opts.Download, m.image.SourceParameters["url"]
	o := registry.Options{Start: d.Start, Stall: d.Stall, Pause: d.Pause, Resumes: d.Resumes,
		PlainHTTP: m.image.SourceParameters["plainHTTP"] == "true"}
	secret, err := m.readSecret(ctx, m.image.SecretRef)
	if err == nil {
		err = applyAccount(&o, url, secret)
	}
	if err != nil {
		return nil, explainSecret(m.image.SecretRef, err)
	}
	if o.Allow, err = m.allowedAddresses(ctx); err != nil {
		return nil, err
	}
	o.Resumed = m.logCut("transfer from a registry")
	o.Resolved = func(digest string) { m.log.Info("image found in its registry", "url", url, "digest", digest) }
	return m.openResumable("transfer from a registry", func(k *importer.Checkpoint) (*origin.Stream, error) {
		o.From = registry.From{}
		if k != nil {
			o.From = registry.From{Mark: k.Mark, State: k.State}
		}
		return registry.Open(ctx, url, o)
	})
}

// openResumable opens an origin at the checkpoint, and from the start if the content of the origin changed.
func (m *imageImport) openResumable(kind string, open func(*importer.Checkpoint) (*origin.Stream, error)) (
	*origin.Stream, error,
) {
	k := m.spec.Checkpoint
	s, err := open(k)
	switch {
	case k == nil:
	case origin.Changed(err):
		m.log.Warn(kind+" cannot be continued and starts again", "bytes", k.Mark.Off, "cause", err)
		k.Drop()
		return open(nil)
	case err == nil:
		m.log.Info(kind+" continues", "bytes", k.Mark.Off, "of", k.Mark.Size)
	}
	return s, err
}

func (m *imageImport) logCut(kind string) func(int64, error) {
	return func(off int64, cause error) {
		m.log.Warn(kind+" was cut, requesting the rest", "bytes", off, "cause", cause)
	}
}

// allowedAddresses returns which addresses outside the public internet an origin may have; nil: none.
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

// readSecret reads the Secret of an image; nil without a Secret.
func (n *copyReconciler) readSecret(ctx context.Context, ref *api.SecretRef) (map[string][]byte, error) {
	if ref == nil {
		return nil, nil
	}
	var s corev1.Secret
	err := n.live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &s)
	if client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "cannot be read")
	}
	if err != nil {
		return nil, api.Errorf(api.NotFound, "does not exist: create it, the image is then tried again")
	}
	return s.Data, nil
}

// explainSecret names the Secret in an error. A Secret can be corrected, so no error of a Secret is final.
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

// accessOf reads the credentials of a download from a Secret.
func accessOf(secret map[string][]byte) (originhttp.Access, error) {
	// Tools that read a Secret from a file often leave the end of a line in the value.
	line := func(key string) string { return strings.TrimRight(string(secret[key]), "\r\n") }
	a := originhttp.Access{Username: line(api.SecretUsername), Password: line(api.SecretPassword),
		Token: line(api.SecretToken), CA: secret[api.SecretCA], Header: http.Header{}}
	for key := range secret {
		if name, ok := strings.CutPrefix(key, api.SecretHeader); ok {
			a.Header.Set(name, line(key))
		}
	}
	if secret != nil && a.Username == "" && a.Password == "" && a.Token == "" && len(a.CA)+len(a.Header) == 0 {
		return a, api.Errorf(api.Invalid, "holds none of %s, %s, %s, %s and %s<name>", api.SecretUsername,
			api.SecretPassword, api.SecretToken, api.SecretCA, api.SecretHeader)
	}
	return a, a.Check()
}

// applyAccount puts the account and the authorities for the registry of url from a Secret into o.
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
		return api.Errorf(api.Invalid, "holds none of %s with %s, %s, and %s", api.SecretUsername, api.SecretPassword,
			api.SecretDocker, api.SecretCA)
	case err != nil:
		return err
	}
	o.CA = a.CA
	return nil
}
