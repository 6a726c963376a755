{{- define "kvrelay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvrelay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvrelay.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvrelay.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Below, "component" templates take (dict "root" $ "role" ROLE): differences between gateway, prefill and decode are looked up by role. */}}

{{- define "kvrelay.component.suffix" -}}
{{- if eq .role "gateway" -}}gateway{{- else -}}{{ .role }}-worker{{- end -}}
{{- end -}}

{{/* For a pool of one of several models, "model" is the model's name: it is a label, and part of the names of the pool's objects. */}}
{{- define "kvrelay.component.fullname" -}}
{{- $name := include "kvrelay.fullname" .root -}}
{{- with .model -}}
{{- $name = include "kvrelay.model.fullname" $ -}}
{{- end -}}
{{- $name }}-{{ include "kvrelay.component.suffix" . -}}
{{- end -}}

{{/* With a role's suffix at most 57 characters: Kubernetes cuts longer names of Deployments off in the names of their pods. */}}
{{- define "kvrelay.model.fullname" -}}
{{- printf "%s-%s" (include "kvrelay.fullname" .root | trunc (int (sub 41 (len .model))) | trimSuffix "-") .model -}}
{{- end -}}

{{/* The regular expression of all pods' names. With a long name, pools of several models begin with a part of it only. */}}
{{- define "kvrelay.pods" -}}
{{- $names := list (include "kvrelay.fullname" .) -}}
{{- range $model, $given := .Values.models -}}
{{- $name := include "kvrelay.model.fullname" (dict "root" $ "model" $model) -}}
{{- if not (hasPrefix (printf "%s-" (first $names)) $name) -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- join "-.*|" $names }}-.*
{{- end -}}

{{- define "kvrelay.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvrelay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvrelay.component.selectorLabels" -}}
{{ include "kvrelay.selectorLabels" .root }}
app.kubernetes.io/component: {{ include "kvrelay.component.suffix" . }}
{{- if ne .role "gateway" }}
kvrelay.dev/role: {{ .role }}
{{- end }}
{{- with .model }}
kvrelay.dev/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
A role's objects of one template: (dict "root" $ "role" ROLE "template" NAME). Of several models each has its own, of values in which
those below models.NAME lie over the others. A template gets "seen", if it is given.
*/}}
{{- define "kvrelay.pools" -}}
{{- $all := . -}}
{{- if not .root.Values.models }}
{{ include .template (dict "root" .root "role" .role "seen" .seen) }}
{{- end }}
{{- range $name, $given := .root.Values.models }}
{{- $values := mergeOverwrite (deepCopy $all.root.Values) (deepCopy $given) }}
{{- $root := dict "Values" $values "Release" $all.root.Release "Chart" $all.root.Chart "Capabilities" $all.root.Capabilities }}
---
{{ include $all.template (dict "root" $root "role" $all.role "model" $name "seen" $all.seen) }}
{{- end }}
{{- end -}}

{{- define "kvrelay.component.labels" -}}
{{ include "kvrelay.component.selectorLabels" . }}
{{ include "kvrelay.commonLabels" .root }}
{{- end -}}

{{- define "kvrelay.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvrelay
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvrelay.component.serviceAccountName" -}}
{{- $account := (index .root.Values .role).serviceAccount -}}
{{- if $account.create -}}
{{- default (include "kvrelay.component.fullname" .) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "which" "gateway" or "worker", "suffix": appended to the default tag). */}}
{{- define "kvrelay.image" -}}
{{- $image := .root.Values.image -}}
{{- $which := index $image .which -}}
{{- if $image.registry }}{{ $image.registry }}/{{ end }}{{ $which.repository -}}
{{- if $which.digest }}@{{ $which.digest }}{{ else }}:{{ default (print .root.Chart.AppVersion (default "" .suffix)) $image.tag }}{{ end -}}
{{- end -}}

{{/* Settings as KVRELAY_* variables. */}}
{{- define "kvrelay.settings" -}}
{{- range $name, $value := . }}
- name: KVRELAY_{{ $name | upper }}
  {{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
  {{- else if kindIs "float64" $value }}
  {{- /* Helm reads every number as a float; an integer must not be rendered as 1e+06. */}}
  value: {{ if eq (floor $value) $value }}{{ $value | int64 | quote }}{{ else }}{{ $value | quote }}{{ end }}
  {{- else }}
  value: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The gateways' scheme. Their pods' port is called http in both cases, because NetworkPolicies and scrapers use that name. */}}
{{- define "kvrelay.gateway.scheme" -}}
{{- if .Values.gateway.tls.secretName -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* How long a drain may take: the component's setting, or the default of all programs. */}}
{{- define "kvrelay.component.drainSeconds" -}}
{{- (index .root.Values .role).settings.drain_s | default 30 | float64 | ceil | int64 -}}
{{- end -}}

{{- define "kvrelay.model.path" -}}
{{- if eq .Values.model.source "volume" -}}/model/{{ .Values.model.name | trimPrefix "/" }}{{- else -}}{{ .Values.model.name }}{{- end -}}
{{- end -}}

{{/* Every component's variables and mounts for its model. */}}
{{- define "kvrelay.model.env" -}}
- name: KVRELAY_MODEL
  value: {{ include "kvrelay.model.path" . | quote }}
{{ include "kvrelay.model.places" . }}
{{- end -}}

{{- define "kvrelay.model.places" -}}
- name: HF_HOME
  value: /cache/huggingface
- name: XDG_CACHE_HOME
  value: /cache
- name: HOME
  value: /tmp
{{- if eq .Values.model.source "volume" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else if .Values.model.huggingFace.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.huggingFace.tokenSecret.name }}
      key: {{ .Values.model.huggingFace.tokenSecret.key }}
{{- end }}
{{- if include "kvrelay.adapters.given" .Values.adapters }}
- name: KVRELAY_ADAPTERS
  value: /adapters
{{- end }}
{{- end -}}

{{/* With several models, for gateways: each model's name, directory and volumes. */}}
{{- define "kvrelay.models.list" -}}
{{- $models := list -}}
{{- range $name, $given := .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $.Values.model) (deepCopy (required (printf "models.%s.model is empty: give it a name" $name) $given.model)) -}}
{{- $path := required (printf "models.%s.model.name is empty: a Hugging Face id, or a directory inside the volume" $name) $given.model.name -}}
{{- if eq $model.source "volume" -}}
{{- $path = printf "/models/%s/%s" $name (trimPrefix "/" $path) -}}
{{- end -}}
{{- $models = append $models (printf "%s=%s" $name $path) -}}
{{- end -}}
{{- join "," $models -}}
{{- end -}}

{{- define "kvrelay.models.mounts" -}}
{{- range $name, $given := .Values.models }}
{{- $model := mergeOverwrite (deepCopy $.Values.model) (deepCopy $given.model) }}
{{- if eq $model.source "volume" }}
- name: model-{{ $name }}
  mountPath: /models/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvrelay.models.volumes" -}}
{{- range $name, $given := .Values.models }}
{{- $model := mergeOverwrite (deepCopy $.Values.model) (deepCopy $given.model) }}
{{- if eq $model.source "volume" }}
- name: model-{{ $name }}
  {{- include "kvrelay.model.volume" $model | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvrelay.model.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if eq .Values.model.source "volume" }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvrelay.model.volumes" -}}
- name: tmp
  emptyDir: {}
{{- $cache := .Values.model.huggingFace.cache }}
- name: cache
  {{- if and (eq .Values.model.source "huggingface") $cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim }}
  {{- else }}
  emptyDir:
    {{- if $cache.sizeLimit }}
    sizeLimit: {{ $cache.sizeLimit }}
    {{- else }} {}
    {{- end }}
  {{- end }}
{{- if eq .Values.model.source "volume" }}
- name: model
  {{- include "kvrelay.model.volume" .Values.model | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The directory of a model's files; takes the values below `model`. */}}
{{- define "kvrelay.model.volume" -}}
{{- if .volume.existingClaim -}}
persistentVolumeClaim:
  claimName: {{ .volume.existingClaim }}
  readOnly: true
{{- else -}}
hostPath:
  path: {{ required "model.source is volume: set model.volume.existingClaim or model.volume.hostPath" .volume.hostPath }}
  type: Directory
{{- end -}}
{{- end -}}

{{/* Whether there are adapters; takes the values of `adapters`. */}}
{{- define "kvrelay.adapters.given" -}}
{{- if or .existingClaim .hostPath }}yes{{ end -}}
{{- end -}}

{{/* A volume of adapters; takes (dict "name" NAME "adapters" VALUES). */}}
{{- define "kvrelay.adapters.volume" -}}
- name: {{ .name }}
  {{- if .adapters.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .adapters.existingClaim }}
  {{- else }}
  hostPath:
    path: {{ .adapters.hostPath }}
    type: Directory
  {{- end }}
{{- end -}}

{{/* Refuses adapters that a component's settings name, too. Takes (dict "role" ROLE "settings" SETTINGS), and renders nothing. */}}
{{- define "kvrelay.adapters.onePlace" -}}
{{- if .settings.adapters -}}
{{- fail (printf "%s.settings.adapters and adapters both say where adapters are; leave %s.settings.adapters out" .role .role) -}}
{{- end -}}
{{- end -}}

{{/* Of several models, the comma-separated names of those with adapters. */}}
{{- define "kvrelay.models.adapted" -}}
{{- if and .Values.models (include "kvrelay.adapters.given" .Values.adapters) -}}
{{- fail "adapters are of one model, and there are several: leave them out, and set models.NAME.adapters" -}}
{{- end -}}
{{- $names := list -}}
{{- range $name, $given := .Values.models -}}
{{- if include "kvrelay.adapters.given" (default (dict) $given.adapters) -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* The fields of a pod that follow from its component's values: scheduling and security. */}}
{{- define "kvrelay.component.podSpec" -}}
{{- $values := index .root.Values .role -}}
serviceAccountName: {{ include "kvrelay.component.serviceAccountName" . }}
automountServiceAccountToken: {{ eq .role "gateway" }}
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvrelay.component.selectorLabels" . | nindent 8 }}
  {{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Not empty if there are no prefill workers on purpose, so that decode workers compute all prompts: (a model's values). */}}
{{- define "kvrelay.noPrefill" -}}
{{- if not (or .prefill.replicas .prefill.autoscaling.hpa.enabled .prefill.autoscaling.keda.enabled) -}}true{{- end -}}
{{- end -}}

{{/* replicas, unless an autoscaler sets them. */}}
{{- define "kvrelay.component.replicas" -}}
{{- $values := index .root.Values .role -}}
{{- if and $values.autoscaling.hpa.enabled $values.autoscaling.keda.enabled -}}
{{- fail (printf "%s.autoscaling: hpa and keda are both enabled, and would fight over the replicas; enable one" .role) -}}
{{- end -}}
{{- if not (or $values.autoscaling.hpa.enabled $values.autoscaling.keda.enabled) -}}
replicas: {{ $values.replicas }}
{{- end -}}
{{- end -}}

{{/* How pods are replaced. With Recreate, the default's rollingUpdate must not be inherited. */}}
{{- define "kvrelay.component.strategy" -}}
{{- $strategy := (index .root.Values .role).strategy -}}
{{- if eq (default "RollingUpdate" $strategy.type) "Recreate" -}}
strategy:
  type: Recreate
{{- else -}}
strategy:
  type: RollingUpdate
  {{- toYaml (omit $strategy "type") | nindent 2 }}
{{- end -}}
{{- end -}}
