package controller

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// readAttachment returns the workload's attachment of a volume, or nil.
func (s *Server) readAttachment(ctx context.Context, volume string) (*api.Attachment, error) {
	att := &api.Attachment{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: volume}, att); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return nil, api.Explain(err, "read the attachment of volume %s", volume)
	}
	return att, nil
}

// ControllerPublishVolume asks for the volume's device on a node and waits until the device exists.
func (s *Server) ControllerPublishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (
	*csi.ControllerPublishVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" || req.GetNodeId() == "" || req.GetVolumeCapability() == nil {
		return nil, api.Errorf(api.Invalid, "publishing needs a volume, a node and a volume capability")
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := s.knownNode(ctx, req.GetNodeId()); err != nil {
		return nil, err
	}
	if vol.DeletionTimestamp != nil {
		return nil, api.Errorf(api.InUse, "volume %s is being deleted", vol.Name)
	}
	if err := vol.RefuseStandby(); err != nil {
		return nil, err
	}
	if err := s.strictlyElsewhere(ctx, vol, req.GetNodeId()); err != nil {
		return nil, err
	}
	readOnly := req.GetReadonly() ||
		req.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	att, err := s.ensureAttachment(ctx, vol, req.GetNodeId(), readOnly)
	if err != nil {
		return nil, err
	}
	msg := ""
	if _, err := await.Until(ctx, s.client, att.Name, func(a *api.Attachment) (bool, error) {
		if msg = a.Status.Message; msg != "" {
			msg = " (" + msg + ")"
		}
		if a.UID != att.UID || a.DeletionTimestamp != nil {
			return false, api.Errorf(api.Busy, "the volume was detached meanwhile: try again")
		}
		return a.Status.Ready, nil
	}); err != nil {
		if apierrors.IsNotFound(err) {
			err = api.Errorf(api.Busy, "the volume was detached meanwhile: try again")
		}
		return nil, api.Explain(err, "attach volume %s to node %s%s", vol.Name, req.GetNodeId(), msg)
	}
	return &csi.ControllerPublishVolumeResponse{}, nil
}

func (s *Server) knownNode(ctx context.Context, name string) error {
	if validID(name) {
		err := s.client.Get(ctx, client.ObjectKey{Name: name}, &api.Node{})
		if !apierrors.IsNotFound(err) {
			return api.Explain(err, "read node %s", name)
		}
	}
	return api.Errorf(api.NotFound, "node %.80q does not exist", name)
}

// strictlyElsewhere refuses to attach a strict-local volume on a node without the volume's data.
func (s *Server) strictlyElsewhere(ctx context.Context, vol *api.Volume, node string) error {
	if vol.Spec.DataLocality != localStrict {
		return nil
	}
	reps := &api.ReplicaList{}
	if err := s.client.List(ctx, reps, client.MatchingLabels{api.LabelVolume: api.LabelValue(vol.Name)}); err != nil {
		return api.Explain(err, "list the replicas of volume %s", vol.Name)
	}
	at := strictNodes(vol, reps.OfVolume(vol.Name))
	if len(at) == 0 || slices.Contains(at, node) {
		return nil
	}
	return api.Errorf(api.InUse, "volume %s cannot be attached to node %s: its dataLocality is strict-local, and its "+
		"data is on node %s", vol.Name, node, strings.Join(at, ", "))
}

// mayBeStrict refuses strict-local for a volume that is attached on a node without the volume's data.
func (s *Server) mayBeStrict(ctx context.Context, vol *api.Volume, spec *api.VolumeSpec) error {
	att, err := s.readAttachment(ctx, vol.Name)
	if err != nil || att == nil {
		return err
	}
	strict := vol.DeepCopy()
	strict.Spec.DataLocality = spec.DataLocality
	return s.strictlyElsewhere(ctx, strict, att.Spec.Node)
}

// ensureAttachment creates the attachment, or verifies that an existing attachment is the same wish.
func (s *Server) ensureAttachment(ctx context.Context, vol *api.Volume, node string, readOnly bool) (
	*api.Attachment, error) {
	s.attach.Lock()
	defer s.attach.Unlock()
	att, err := s.readAttachment(ctx, vol.Name)
	if err != nil {
		return nil, err
	}
	if att == nil {
		if err := s.checkAttachLimit(ctx, node); err != nil {
			return nil, api.Explain(err, "attach volume %s", vol.Name)
		}
		att = &api.Attachment{
			ObjectMeta: metav1.ObjectMeta{Name: vol.Name,
				Labels:      map[string]string{api.LabelVolume: api.LabelValue(vol.Name), api.LabelNode: api.LabelValue(node)},
				Annotations: map[string]string{api.AnnotationDoor: "csi"}},
			Spec: api.AttachmentSpec{Volume: vol.Name, Node: node, ReadOnly: readOnly, Purpose: "workload"},
		}
		err := s.client.Create(ctx, att)
		if err == nil {
			return att, nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return nil, api.Explain(err, "attach volume %s to node %s", vol.Name, node)
		}
		if att, err = s.readAttachment(ctx, vol.Name); err != nil {
			return nil, err
		}
	}
	switch {
	case att == nil || att.DeletionTimestamp != nil:
		return nil, api.Errorf(api.Busy, "volume %s is being detached: try again", vol.Name)
	case att.Spec.Node != node:
		return nil, api.Errorf(api.InUse, "volume %s is attached to node %s: detach it there first", vol.Name,
			att.Spec.Node)
	case att.Spec.ReadOnly != readOnly:
		return nil, api.Errorf(api.Exists, "volume %s is attached to node %s with read-only %v, not %v", vol.Name, node,
			att.Spec.ReadOnly, readOnly)
	}
	return att, nil
}

// checkAttachLimit refuses an attachment beyond the node's limit.
func (s *Server) checkAttachLimit(ctx context.Context, node string) error {
	limit, err := s.readNumber(ctx, "volume-attach-limit")
	if err != nil {
		return err
	}
	all := &api.AttachmentList{}
	if err := s.client.List(ctx, all); err != nil {
		return api.Explain(err, "list attachments")
	}
	n := int64(0)
	for i := range all.Items {
		if all.Items[i].Spec.Node == node {
			n++
		}
	}
	if limit > 0 && n >= limit {
		return api.Errorf(api.Full, "node %s has %d volumes attached, its limit (setting volume-attach-limit)", node, n)
	}
	return nil
}

// ControllerUnpublishVolume gives the device up and waits until the device is gone.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (
	*csi.ControllerUnpublishVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	done := &csi.ControllerUnpublishVolumeResponse{}
	if !validID(req.GetVolumeId()) {
		return done, nil
	}
	att, err := s.readAttachment(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if att == nil || (req.GetNodeId() != "" && att.Spec.Node != req.GetNodeId()) {
		return done, nil
	}
	uid := att.UID
	if err := s.client.Delete(ctx, att, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "detach volume %s", att.Name)
	}
	msg := ""
	see := func(a *api.Attachment) {
		if msg = a.Status.Message; msg != "" {
			msg = " (" + msg + ")"
		}
	}
	if err := await.Gone(ctx, s.client, att, see); err != nil {
		return nil, api.Explain(err, "detach volume %s from node %s%s", att.Name, att.Spec.Node, msg)
	}
	return done, nil
}

// ValidateVolumeCapabilities confirms capabilities, the volume's parameters and the volume's context, or names the
// misfit.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (
	*csi.ValidateVolumeCapabilitiesResponse, error) {
	if req.GetVolumeId() == "" || len(req.GetVolumeCapabilities()) == 0 {
		return nil, api.Errorf(api.Invalid, "validating needs a volume and at least one volume capability")
	}
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	no := func(msg string) (*csi.ValidateVolumeCapabilitiesResponse, error) {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: msg}, nil
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return no(err.Error())
	}
	if _, err := fsType(vol.Spec.FSType, req.GetVolumeCapabilities()); err != nil {
		return no(err.Error())
	}
	w := &wish{}
	if err := w.parseParameters(req.GetParameters()); err != nil {
		return no(err.Error())
	}
	for k, v := range withoutSidecarKeys(req.GetParameters()) {
		if vol.Spec.Parameters[k] != v {
			return no("parameter " + k + " differs from the parameter at the volume's creation")
		}
	}
	if err := w.parseMutable(req.GetMutableParameters()); err != nil {
		return no(err.Error())
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: req.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters: req.GetParameters(), MutableParameters: req.GetMutableParameters()}}, nil
}

// publishedNodes returns the nodes that each volume is attached to, or still leaving.
func (s *Server) publishedNodes(ctx context.Context) (map[string][]string, error) {
	all := &api.AttachmentList{}
	if err := s.client.List(ctx, all); err != nil {
		return nil, api.Explain(err, "list attachments")
	}
	out := map[string][]string{}
	for _, a := range all.Items {
		if (a.Status.Ready || a.DeletionTimestamp != nil) && !slices.Contains(out[a.Spec.Volume], a.Spec.Node) {
			out[a.Spec.Volume] = append(out[a.Spec.Volume], a.Spec.Node)
		}
	}
	return out, nil
}
